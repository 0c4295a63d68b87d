"""A report of a run: one HTML file with plots, verdict, attempts and config, to send to others.

It holds everything it shows: no script, no font, nothing that is fetched. The document is built as
a tree of elements, so texts of a model are escaped wherever they stand.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from kit.types import Json
from trainer.errors import NotFound
from trainer.page import batches, evals, examples, groups, overview
from trainer.page.figures import Line, Values, plot
from trainer.page.reader import Run
from trainer.page.series import series

_STYLE = Path(__file__).parent / "files" / "report.css"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
POINTS = 400
LONGEST = 4000
"""Characters of a message that a report holds."""
_PLOTS = {
    "loss/entropy": "Entropy, nats per token",
    "loss/kl_div": "KL of a step, nats per token",
    "loss/grad_norm": "Gradient norm",
    "loss/clip_frac": "Clipped tokens, share",
    "loss/sampler_gap": "Engine against learner, nats per token",
    "data/step_num_groups_trainable": "Groups that teach, per step",
    "data/step_num_truncated": "Answers cut off, per step",
    "time/step_s": "Time of a training step, s",
}


def write_report(run_directory: Path, output: Path) -> Path:
    """Write the report of the run in `run_directory` to `output`, and return it."""
    if not run_directory.is_dir():
        raise NotFound(
            f"There is no run in `{run_directory}`", hint="Name a directory that `pull` has written"
        )
    run = Run(run_directory.parent.parent.name, run_directory.name, run_directory)
    root = _document(run)
    text = "<!doctype html>\n" + tostring(root, encoding="unicode", method="html")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.tmp")  # a reader never sees half a report
    temporary.write_bytes(text.encode("utf-8", "replace"))
    temporary.replace(output)
    return output


def _document(run: Run) -> Element:
    about = overview.overview(run, "ended")
    root = Element("html", {"lang": "en"})
    head = SubElement(root, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    _text(head, "title", f"{run.name}: report")
    SubElement(head, "style").text = _STYLE.read_text(encoding="utf-8")
    main = SubElement(SubElement(root, "body"), "main")
    _text(main, "h1", run.name)
    model = about["run"]["base_model"] or "an unknown base model"
    written = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime())
    _text(main, "p", f"Project {run.project}, trained from {model}. Written {written}.", "quiet")
    _add_verdict(main, about)
    _add_plots(main, run, about["columns"])
    _add_evals(main, run)
    _add_attempts(main, run)
    _add_config(main, about["config"])
    return root


def _text(parent: Element, tag: str, text: str, kind: str = "") -> Element:
    element = SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = _CONTROL.sub("\ufffd", text)
    return element


def _section(main: Element, title: str) -> Element:
    section = SubElement(main, "section")
    _text(section, "h2", title)
    return section


def _add_verdict(main: Element, about: Json) -> None:
    section = _section(main, "Verdict")
    verdict = about["verdict"]
    for sentence in verdict["sentences"]:
        _text(section, "p", sentence, "lead")
    if not verdict["findings"]:
        _text(section, "p", "The doctor found nothing wrong with the last steps.", "quiet")
    for finding in verdict["findings"]:
        item = _text(section, "p", finding["problem"], "finding")
        _text(item, "span", finding["hint"])
    for sentence in about["missing"]:
        _text(section, "p", sentence, "quiet")


def _add_plots(main: Element, run: Run, columns: list[str]) -> None:
    section = _section(main, "Plots")
    parts = sorted(
        {name.partition("/")[2] for name in columns if name.startswith(("train/", "val/"))}
        - {"reward", "reward_std_dev", "exception_rate"}
    )
    rewards = ["train/reward", "train/reward_std_dev", "val/reward"]
    names = [*rewards, *(f"{split}/{it}" for split in ("train", "val") for it in parts), *_PLOTS]
    found = series(run, names, points=POINTS)
    steps, known = found["step"], found["series"]
    if not steps:
        _text(section, "p", "The run has no history: there is nothing to plot.", "quiet")
        return
    if lines := _lines(known, "reward"):
        band = _spread(known) if lines[0].label == "training" else None
        figure = plot("Mean reward of a step", steps, lines, band=band, width=720, height=260)
        section.append(figure)
    grid = SubElement(section, "div", {"class": "multiples"})
    for part in parts:
        if lines := _lines(known, part):
            grid.append(plot(part.replace("_", " ").capitalize(), steps, lines))
    for name, title in _PLOTS.items():
        if any(value is not None for value in known[name]):
            grid.append(plot(title, steps, [Line(title, known[name])]))


def _lines(known: dict[str, list[float | None]], name: str) -> list[Line]:
    splits = (("train", "training", "accent"), ("val", "validation", "ink"))
    return [
        Line(label, known[f"{split}/{name}"], tone)
        for split, label, tone in splits
        if any(value is not None for value in known[f"{split}/{name}"])
    ]


def _spread(known: dict[str, list[float | None]]) -> tuple[Values, Values] | None:
    pairs = list(zip(known["train/reward"], known["train/reward_std_dev"], strict=True))
    if all(mean is None or spread is None for mean, spread in pairs):
        return None
    low = [None if mean is None or by is None else mean - by for mean, by in pairs]
    high = [None if mean is None or by is None else mean + by for mean, by in pairs]
    return low, high


def _add_evals(main: Element, run: Run) -> None:
    found = evals.evals(run)["evals"]
    if not found:
        return
    section = _section(main, "Evaluations")
    for one in found:
        _text(section, "h3", one["name"])
        about = f"{one['examples']} examples, runs of each: {one['num_generations']}"
        _text(section, "p", f"{about}; {one['interval_method']}", "quiet")
        ks = [it["k"] for it in one["models"][0]["pass_at"]] if one["models"] else []
        names = (
            "Model",
            "Reward",
            "95 %",
            *(f"pass@{k}" for k in ks),
            "Difference",
            "95 %",
            "Lost",
        )
        table = SubElement(section, "table", {"class": "numbers"})
        row = SubElement(table, "tr")
        for name in names:
            _text(row, "th", name)
        for model in one["models"]:
            row = SubElement(table, "tr")
            for cell in _eval_cells(model):
                _text(row, "td", cell)
        for sentence in one["missing"]:
            _text(section, "p", sentence, "quiet")


def _eval_cells(model: Json) -> Iterator[str]:
    paired = model["paired"] or {"difference": None, "interval": None}
    yield model["model"]
    yield _number(model["mean"])
    yield _interval(model["interval"])
    for one in model["pass_at"]:
        yield _number(one["mean"])
    yield _number(paired["difference"], "+")
    yield _interval(paired["interval"], "+")
    lost = ", ".join(f"{reason.replace('_', ' ')}: {n}" for reason, n in model["lost"].items())
    yield lost or "none"


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


def _interval(interval: tuple[float, float] | None, sign: str = "") -> str:
    return "-" if interval is None else " to ".join(_number(edge, sign) for edge in interval)


def _add_attempts(main: Element, run: Run) -> None:
    section = _section(main, "Attempts")
    kept = run.kept().get(batches.TRAIN, [])
    chosen = list(_chosen(run, kept))
    if not chosen:
        _text(section, "p", "No step's attempts are on disk, so none can be shown.", "quiet")
    for title, step, attempt in chosen:
        _add_attempt(section, title, step, attempt)


def _chosen(run: Run, kept: list[int]) -> Iterator[tuple[str, int, Json]]:
    """The best and worst attempt of the newest kept step, and the example that rose most."""
    for step in reversed(kept):
        attempts = _attempts(run, step)
        if attempts:
            yield "Best of the newest step", step, attempts[-1]
            yield "Worst of the newest step", step, attempts[0]
            break
    rows = examples.examples(run, order="trend", limit=1, offset=0)["rows"]
    steps = [step for step in rows[0]["steps"] if step in set(kept)] if rows else []
    if len(steps) < 2 or not (rows[0]["trend"] or 0.0) > 0:
        return
    for title, step in (("before", steps[0]), ("after", steps[-1])):
        if attempts := _attempts(run, step, rows[0]["example"]):
            yield f"Most improved example, {title}", step, attempts[len(attempts) // 2]


def _attempts(run: Run, step: int, example: str | None = None) -> list[Json]:
    """Attempts of a step by reward, lowest first: of one example, or the outermost groups."""
    try:
        listed = [it for it in groups.step(run, step)["groups"] if it["mean"] is not None]
        if example is not None:
            wanted = [it for it in listed if it["example"] == example]
        else:
            wanted = [
                pick(listed, key=lambda it: it[edge])
                for pick, edge in ((min, "min"), (max, "max"))
                if listed
            ]
        found = [
            attempt
            for group in wanted
            for attempt in groups.group(run, step, group["id"])["attempts"]
            if attempt["reward"] is not None
        ]
    except NotFound:  # deleted or damaged since it was listed
        return []
    return sorted(found, key=lambda it: it["reward"])


def _add_attempt(section: Element, title: str, step: int, attempt: Json) -> None:
    article = SubElement(section, "article")
    _text(article, "h3", title)
    parts = ", ".join(f"{name} {value}" for name, value in attempt["parts"].items())
    about = (
        f"Step {step}, example {attempt['example'] or 'unknown'}: reward {attempt['reward']:.3f}"
    )
    _text(article, "p", about + (f" ({parts})" if parts else ""), "quiet")
    for judge in attempt["judge"]:
        _text(article, "p", f"{judge['name']}: {judge['reason']}", "judge")
    for conversation in attempt["conversations"]:
        for message in conversation["messages"]:
            _add_message(article, message)


def _add_message(article: Element, message: Json) -> None:
    box = SubElement(article, "div", {"class": "message"})
    _text(box, "span", message["role"], "role")
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if text:
        _text(box, "pre", text[:LONGEST])
    left = len(text) - LONGEST + (message.get("cut") or 0)
    if left > 0 and len(text) > LONGEST:
        _text(box, "p", f"… and {left} more characters", "quiet")
    for call in message.get("tool_calls") or []:
        called = call.get("function") or call if isinstance(call, dict) else {"name": str(call)}
        name, arguments = called.get("name"), called.get("arguments", "")
        _text(box, "pre", f"calls {name}({arguments})", "call")


def _add_config(main: Element, config: Json) -> None:
    section = _section(main, "Config")
    rows = list(_flat(config))
    if not rows:
        _text(section, "p", "No config was recorded: there is no checkpoint here.", "quiet")
        return
    table = SubElement(section, "table")
    for name, value in rows:
        row = SubElement(table, "tr")
        _text(row, "th", name)
        _text(row, "td", value)


def _flat(value: Json, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner if isinstance(inner, str) else json.dumps(inner)
