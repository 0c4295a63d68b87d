"""Console output: log lines as in NVIDIA's guide; on a terminal a table and live bars instead.

On a terminal every epoch becomes a row of a table, and its log lines go only to `finetune.log`.
Without a terminal they are printed as well.
"""

import logging
import logging.handlers
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from kit.types import Json
from trainer.errors import storage_error
from trainer.harness.types import WorkflowRun
from trainer.harness.user_texts import text_of

LOG = "finetune.log"
EACH_EPOCH: Mapping[str, object] = {"each_epoch": True}
"""`extra` of the log lines that every epoch repeats, which a terminal shows as a row."""


class Progress:
    """Bars with reward, trajectories per second and time left. Hidden without a terminal."""

    def __init__(self, console: Console, of: str = "epochs") -> None:
        self.console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._outer = self._bar.add_task(of, total=None, status="")
        self._runs = self._bar.add_task("runs", total=None, status="", visible=False)
        self._started = time.monotonic()
        self._phase_started = self._started
        self._done = self._finished = self._total = 0
        self._reward = "reward -"
        self._table: EpochTable | None = None

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, total: int, done: int) -> None:
        """Start with `done` of `total` epochs finished by earlier programs."""
        self._total, self._finished, self._done = total, done, 0
        self._started = time.monotonic()
        self._bar.update(self._outer, total=total, completed=done)

    def phase(self, name: str, total: int) -> None:
        """Start a phase of `total` workflow runs."""
        self._phase_started = time.monotonic()
        self._bar.reset(self._runs, total=total, description=name, visible=True)

    def run_done(self, _: WorkflowRun) -> None:
        self._bar.advance(self._runs)
        task = self._bar.tasks[self._runs]
        rate = task.completed / max(time.monotonic() - self._phase_started, 1e-6)
        self._bar.update(self._runs, status=f"{rate:.1f} trajectories/s")

    def groups(self, ready: int, needed: int) -> None:
        """Show how many of the groups that a step needs are complete."""
        self._bar.update(
            self._runs,
            total=needed,
            completed=ready,
            description="groups",
            status="",
            visible=True,
        )

    def training(self, step: int | None) -> None:
        self._bar.reset(self._runs, total=None, description="training", visible=True)
        self._bar.update(self._runs, status="" if step is None else f"step {step}")

    def epoch_row(self, row: Json, validation: Json | None) -> None:
        """Print a row of the table, if there is a terminal."""
        if self.console.is_terminal:
            if self._table is None:
                self._table = EpochTable(self.console, self._total)
            self._table.add(row, validation or {})

    def one_done(self, reward: float | None, validation: float | None = None) -> None:
        """Count an epoch, or a model."""
        self._done += 1
        if reward is not None:
            self._reward = f"reward {reward:.3f}"
        if validation is not None:
            self._reward += f", validation {validation:.3f}"
        seconds = (time.monotonic() - self._started) / self._done
        left = seconds * (self._total - self._finished - self._done)
        status = f"{self._reward}, {int(left // 60)}:{int(left % 60):02d} left"
        self._bar.update(self._outer, completed=self._finished + self._done, status=status)


class EpochTable:
    """A table that grows by a row per epoch, above the bars. Its columns never change."""

    NAMES = (
        *("reward", "spread", "validation", "trainable", "lost"),
        *("sample", "train", "validate", "total"),
    )

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs
        self._widths = {"epoch": max(len("epoch"), 2 * len(str(epochs)) + 1)}
        # Together they fit 80 columns, up to `validate`.
        self._widths |= {name: len(name) for name in self.NAMES} | {"sample": 7, "train": 7}
        self._shown: list[str] = []

    def add(self, row: Json, validation: Json) -> None:
        """Print the row of an epoch, and the header above the first."""
        metrics: Mapping[str, object] = row.get("metrics") or validation.get("metrics") or {}
        if not self._shown:
            self._choose_columns(metrics)
        cells = {**_cells(row, validation), "epoch": f"{row['epoch']}/{self._epochs}"}
        cells |= {name: _number(value) for name, value in metrics.items() if name not in cells}
        self._print({name: cells.get(name) or "-" for name in self._shown}, "")

    def _choose_columns(self, metrics: Mapping[str, object]) -> None:
        """As many columns as the terminal has room for, the evaluators' metrics last."""
        self._widths |= {name: max(len(name), 7) for name in metrics if name not in self._widths}
        used = 0
        for name, width in self._widths.items():
            used += width + (2 if used else 0)
            if used > self._console.width:
                break
            self._shown.append(name)
        self._print({name: name for name in self._shown}, "bold")

    def _print(self, cells: Mapping[str, str], style: str) -> None:
        line = "  ".join(text.rjust(self._widths[name]) for name, text in cells.items())
        self._console.print(Text(line, style=style), soft_wrap=True)


def _cells(row: Json, validation: Json) -> dict[str, str]:
    groups = row.get("num_groups")
    trainable = row.get("data/step_num_groups_trainable", row.get("filtered_groups"))
    return {
        "reward": _number(row.get("avg_reward")),
        "spread": _number(row.get("reward_std_dev")),
        "validation": _number(validation.get("avg_reward")),
        "trainable": "" if groups is None else f"{trainable or 0:g}/{groups}",
        "lost": "" if groups is None else str(sum((row.get("failures") or {}).values())),
        "sample": _seconds(row.get("time/sample_s")),
        "train": _seconds(row.get("time/train_s")),
        "validate": _seconds(row.get("time/validate_s")),
        "total": _seconds(row.get("time/epoch_s")),
    }


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""


def _seconds(value: object) -> str:
    return f"{value:.1f} s" if isinstance(value, int | float) else ""


class ConsoleLines(logging.Handler):
    """Prints `INFO - …` lines, above the bars if there are any."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if self._console.is_terminal and getattr(record, "each_epoch", False):
            return  # the table has it
        line = f"{record.levelname} - {text_of(_Message(record))}"
        # soft_wrap keeps each message on one line when the output is piped.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Message:
    """Prints as the message of a record, whose arguments may be objects of the user's code."""

    def __init__(self, record: logging.LogRecord) -> None:
        self._record = record

    def __str__(self) -> str:
        return self._record.getMessage()


class LogFile(logging.handlers.WatchedFileHandler):
    """Appends every line to a file, and to a new one after the old was moved away."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a full disk must not end a run, nor print a traceback for each line."""


def log_to(console: Console, directory: Path | None = None, level: int = logging.INFO) -> None:
    """Send the harness's log to the console, and all of it to `finetune.log` in `directory`."""
    root = logging.getLogger("trainer.harness")
    for handler in [h for h in root.handlers if isinstance(h, ConsoleLines | LogFile)]:
        root.removeHandler(handler)
        handler.close()
    lines = ConsoleLines(console)
    lines.setLevel(level)
    root.addHandler(lines)
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, f"`{directory}` cannot be created") from error
        file = LogFile(directory / LOG, delay=True, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s - %(message)s"))
        root.addHandler(file)
    root.setLevel(logging.INFO)
    root.propagate = False
