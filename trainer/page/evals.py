"""Reads what `trainer eval` measured for a run: the files `evals/NAME.jsonl` in its directory.

Numbers are computed from the runs in a file, so that an evaluation which was interrupted or goes
on has them too. Texts stay on disk until somebody opens an example.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kit.errors import ConfigError, plural
from kit.state_dir import EVALS
from kit.types import Json
from trainer.errors import NotFound
from trainer.estimates import METHOD
from trainer.measurements import Measurement, compared, measure
from trainer.page.lines import BAD_LINE, Lines, parse
from trainer.page.reader import Run, finite

SETTINGS, RUN, SUMMARY = "settings", "run", "summary"
"""The kinds of lines in a file."""
CUT = 20_000
"""Characters of an output that are shown."""
_Key = tuple[str, str, int]


class EvalFile:
    """The numbers of one file."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.lines = Lines(path, add=self._add, reset=self._reset)
        self._reset()

    def _reset(self) -> None:
        self.rows: dict[_Key, Json] = {}
        """The newest row of each model, example and generation, without its output."""
        self.summary: Json = {}
        self.finished = False
        """Whether a summary follows the newest run."""
        self.not_finite = 0

    def _add(self, line: Json) -> None:
        kind = line.get("kind")
        if kind == RUN:
            row = _numbers(line)
            self.not_finite += row["failure"] is None and row["reward"] is None
            self.rows[row["model"], row["id"], row["generation"]] = row
            self.finished = False
        elif kind == SUMMARY:
            self.summary, self.finished = line, True
        elif kind != SETTINGS:
            raise ValueError("a line of no kind that is known")

    def measured(self) -> dict[str, Measurement]:
        """A measurement for each model; the first is the one that others are compared with."""
        by_model: dict[str, list[Json]] = {}
        models = self.summary.get("models")
        for entry in models if isinstance(models, list) else ():
            if isinstance(entry, dict):
                by_model[str(entry.get("model"))] = []
        for row in list(self.rows.values()):
            by_model.setdefault(row["model"], []).append(row)
        return {model: measure(rows) for model, rows in by_model.items() if rows}


def _numbers(line: Json) -> Json:
    failure, metrics = line["failure"], line["metrics"]
    if not isinstance(metrics, dict) or not isinstance(failure, str | None):
        raise ValueError("a run whose metrics or failure have another type")
    return {
        **{"model": str(line["model"]), "id": str(line["id"])},
        "generation": int(line["generation"]),
        "reward": finite(line["reward"]),
        "failure": failure,
        "metrics": {str(name): finite(value) for name, value in metrics.items()},
    }


def evals(run: Run) -> Json:
    """The evaluations of a run, the newest first."""
    found = [_summary(file) for file in _files(run)]
    return {"evals": sorted(found, key=lambda one: one["updated"] or 0.0, reverse=True)}


def _files(run: Run) -> Iterator[EvalFile]:
    try:
        names = sorted(os.listdir(run.directory / EVALS))
    except OSError:
        return
    for name in names:
        path = run.directory / EVALS / name
        if path.suffix == ".jsonl" and not name.startswith("."):
            file = run.memo(f"{EVALS}/{name}", path, functools.partial(EvalFile, path))
            file.lines.read()
            yield file


def _find(run: Run, name: str) -> EvalFile:
    for file in _files(run):
        if file.name == name:
            return file
    raise NotFound(f"There is no evaluation `{name[:80]}`", hint="`trainer eval` makes one")


def _summary(file: EvalFile) -> Json:
    measured = file.measured()
    examples = {id for _, id, _ in list(file.rows)}
    missing = _missing(file)
    success = finite(file.summary.get("success_reward"))
    try:
        models = compared(measured, _ks(file.summary), success) if measured else []
    except ConfigError as error:  # later runs have rewards between 0 and 1
        missing.append(error.message)
        models = compared(measured, (), None)
    try:
        updated = file.lines.path.stat().st_mtime
    except OSError:
        updated = None
    passes = file.summary.get("success")
    return {
        **{"name": file.name, "file": f"{EVALS}/{file.lines.path.name}", "updated": updated},
        **{"finished": file.finished, "interval_method": METHOD, "models": models},
        "examples": len(examples),
        "num_generations": 1 + max((number for *_, number in list(file.rows)), default=0),
        "success": passes if isinstance(passes, str) else None,
        "missing": missing,
    }


def _ks(summary: Json) -> list[int]:
    """The numbers K for which the last command wanted pass@K."""
    try:
        found = {one["k"] for one in summary["models"][0]["pass_at"]}
    except (KeyError, IndexError, TypeError):
        return []
    return sorted(k for k in found if isinstance(k, int) and k > 0)


def _missing(file: EvalFile) -> list[str]:
    lines, name = file.lines, f"`{EVALS}/{file.lines.path.name}`"
    found = []
    if lines.broken:
        found.append(f"Left out of {name}: {plural(lines.broken, 'line')} that cannot be read")
    if lines.incomplete:
        found.append(f"The last line of {name} is not complete")
    if file.not_finite:
        runs = plural(file.not_finite, "run")
        found.append(f"Left out of {name}: {runs} without a finite reward")
    if not file.rows:
        found.append(f"{name} holds no run that can be read")
    return found


def eval_examples(run: Run, name: str, *, offset: int = 0, limit: int = 100) -> Json:
    """The examples of an evaluation with each model's mean, where models differ most first."""
    measured = _find(run, name).measured()
    means = {model: one.examples for model, one in measured.items()}
    ids = dict.fromkeys(id for of_model in means.values() for id in of_model)
    for _, id, _ in list(_find(run, name).rows):
        ids.setdefault(id)  # an example whose runs were all lost
    rows = [_example(id, means) for id in ids]
    rows.sort(key=lambda row: (-abs(row["difference"] or 0.0), row["example"]))
    return {"total": len(rows), "models": list(means), "rows": rows[offset : offset + limit]}


def _example(id: str, means: Mapping[str, Mapping[str, float]]) -> Json:
    values = [of_model.get(id) for of_model in means.values()]
    first, last = values[0], values[-1]
    known = first is not None and last is not None and len(values) > 1
    return {
        **{"example": id, "means": values},
        "difference": last - first if known else None,  # type: ignore[operator]
    }


def eval_attempts(run: Run, name: str, example: str, *, offset: int = 0, limit: int = 64) -> Json:
    """The runs of one example by all models, with their outputs."""
    file = _find(run, name)
    ranks = {model: at for at, model in enumerate(file.measured())}
    mark = json.dumps(example).encode()  # as `trainer eval` writes it: other lines are not parsed
    found: dict[_Key, Json] = {}
    with file.lines.path.open("rb") as lines:
        for line in lines:
            if mark not in line and b"\\ud" not in line:
                continue
            attempt = _attempt(line)
            if attempt and attempt["example"] == example:
                found[attempt["model"], example, attempt["number"]] = attempt
    if not found:
        raise NotFound(
            f"The evaluation `{name[:80]}` has no example `{example[:80]}`",
            hint="Open the evaluation again",
        )
    rows = sorted(found.values(), key=lambda it: (it["number"], ranks.get(it["model"], 0)))
    return {
        **{"example": example, "total": len(rows)},
        "attempts": rows[offset : offset + limit],
    }


def _attempt(line: bytes) -> Json | None:
    try:
        row = parse(line)
        if row["kind"] != RUN:
            return None
        numbers = _numbers(row)
    except BAD_LINE:
        return None
    output = row.get("output")
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, indent=2)
    reasons = row.get("reasons")
    return {
        **{"model": numbers["model"], "example": numbers["id"], "number": numbers["generation"]},
        **{"reward": numbers["reward"], "parts": numbers["metrics"], "lost": numbers["failure"]},
        "error": str(row.get("error") or "") or None,
        **{"seconds": finite(row.get("seconds")), "output": text[:CUT]},
        "cut": max(len(text) - CUT, 0) or None,
        "judge": [
            {"name": str(judge), "reason": str(reason)}
            for judge, reason in (reasons.items() if isinstance(reasons, dict) else ())
        ],
    }
