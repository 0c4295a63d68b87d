"""The tables of an evaluation: a line per model, and how each differs from the first."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kit.types import Json

WIDE = 1000
"""Columns of a pipe, which has no edge."""


def show(summary: Json, console: Console) -> None:
    """Print the tables and the sentences that explain them."""
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDE)
    console.print(measured(summary))
    if len(summary["models"]) > 1:
        console.print(compared(summary))
    for sentence in sentences(summary):
        console.print(sentence, markup=False, highlight=False)


def _table(first: str, *numbers: str) -> Table:
    # Two narrow tables: one with everything does not fit 80 columns.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def measured(summary: Json) -> Table:
    """The reward of each model."""
    ks = [f"pass@{one['k']}" for one in summary["models"][0]["pass_at"]]
    table = _table("model", "reward", "95 %", *ks, "runs", "lost")
    for row in summary["models"]:
        passes = (_number(one["mean"]) for one in row["pass_at"])
        lost = str(sum(row["lost"].values()))
        cells = (_number(row["mean"]), _interval(row["interval"]), *passes, str(row["runs"]), lost)
        table.add_row(Text(row["model"]), *cells)
    return table


def compared(summary: Json) -> Table:
    """How each model differs from the first."""
    table = _table("by example", "difference", "95 %", "better", "worse", "equal")
    for row in summary["models"]:
        if paired := row["paired"]:
            equal = paired["examples"] - paired["better"] - paired["worse"]
            counts = (str(paired["better"]), str(paired["worse"]), str(equal))
            difference = _number(paired["difference"], sign="+")
            interval = _interval(paired["interval"], sign="+")
            table.add_row(Text(row["model"]), difference, interval, *counts)
    return table


def sentences(summary: Json) -> list[str]:
    """What the numbers mean, and what was lost."""
    runs = summary["num_generations"]
    times = "once" if runs == 1 else f"{runs} times"
    found = [f"{summary['examples']} examples, each {times}; {summary['interval_method']}."]
    if summary["success"]:
        found.append(f"pass@k: unbiased estimate; a run passes if its {summary['success']}.")
    for row in summary["models"]:
        if paired := row["paired"]:
            found.append(_verdict(row["model"], paired))
    for row in summary["models"]:
        for reason, count in row["lost"].items():
            many = "1 run was" if count == 1 else f"{count} runs were"
            found.append(f"{row['model']}: {many} lost ({reason}) and not counted.")
    return found


def _verdict(model: str, paired: Json) -> str:
    if paired["difference"] is None:
        return f"{model} and {paired['against']} have no example in common."
    examples, interval = paired["examples"], paired["interval"]
    common = f"{paired['against']} on {examples} examples"
    same = f"the difference is the same on all {examples}"
    if not paired["clear"]:
        # Without an interval the table has a dash, which says nothing about the reason.
        few = f": {same}, but they are too few" if _same(paired) else ""
        return f"{model}: no clear difference to {common}{few}."
    word = "better" if paired["difference"] > 0 else "worse"
    return f"{model} is {word} than {common}: {'the interval excludes 0' if interval else same}."


def _same(paired: Json) -> bool:
    """Whether all of several examples differ, and by the same amount."""
    changed = paired["better"] + paired["worse"]
    return paired["interval"] is None and paired["examples"] == changed > 1


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


def _interval(interval: list[float] | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    low, high = interval
    return f"{low:{sign}.3f} to {high:{sign}.3f}"
