"""`trainer watch`: the first panels of the page as text, for people on ssh.

The numbers come from the functions behind the page's API, or from the API of a server.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kit.types import Json
from trainer.errors import NotConnected, NotFound, TrainerError
from trainer.page import overview
from trainer.page.reader import Run, Runs
from trainer.page.series import series, steps

INTERVAL = 2.0  # seconds between two looks
RECENT = 120.0  # a run that changed within these seconds is taken to be training
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_REWARD, _SPREAD, _VALIDATION = "train/reward", "train/reward_std_dev", "val/reward"
_TRAINABLE, _GROUPS = "data/step_num_groups_trainable", "data/step_num_groups_submitted"
_LABELS = {
    _REWARD: "training",
    _SPREAD: "spread",
    _VALIDATION: "validation",
    _TRAINABLE: "trainable groups",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
MOST_LINES = 6
"""Metrics or reasons that a panel lists besides its first."""


class Source(Protocol):
    """One run, in a directory or on a server."""

    def overview(self) -> Json: ...
    def series(self, names: Sequence[str]) -> Json: ...
    def steps(self) -> Json: ...


class OnDisk:
    """A run in a directory."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    def find(cls, root: Path, name: str | None) -> "OnDisk":
        found = [
            run for run in Runs(root).all() if name in (None, run.name, f"{run.project}/{run.name}")
        ]
        if not found:
            what = f"no run `{name}`" if name else "no run"
            raise NotFound(
                f"There is {what} in `{root}`",
                hint="Name the directory with `--state-dir`, or a server with `--url`",
            )
        return cls(max(found, key=lambda run: run.times()[1] or 0))

    def overview(self) -> Json:
        changed = self._run.times()[1]
        recent = changed is not None and time.time() - changed < RECENT
        return overview.overview(self._run, "training" if recent else "idle")

    def series(self, names: Sequence[str]) -> Json:
        return series(self._run, names)

    def steps(self) -> Json:
        return steps(self._run)


class OnServer:
    """A run on a server, through its API."""

    def __init__(self, url: str, project: str, name: str) -> None:
        self._path = f"{url}/api/runs/{project}/{name}"

    @classmethod
    def find(cls, url: str, name: str | None) -> "OnServer":
        url = url.rstrip("/")
        runs = [
            run
            for run in _get(f"{url}/api/runs")["runs"]
            if name in (None, run["name"], f"{run['project']}/{run['name']}")
        ]
        if not runs:
            what = f"no run `{name}`" if name else "no run"
            raise NotFound(f"There is {what} at `{url}`", hint="Train one, or name another server")
        newest = max(runs, key=lambda run: run["updated"] or 0)
        return cls(url, newest["project"], newest["name"])

    def overview(self) -> Json:
        return _get(self._path)

    def series(self, names: Sequence[str]) -> Json:
        return _get(f"{self._path}/series", names=",".join(names))

    def steps(self) -> Json:
        return _get(f"{self._path}/steps")


def _get(url: str, **query: str) -> Json:
    key = os.environ.get("ART_API_KEY")
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(url, params=query, headers=headers, timeout=30)
        answer.raise_for_status()
        found: Json = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NotConnected(
            f"Cannot read `{url}`: {error or type(error).__name__}",
            hint="Check the address of the control port, and ART_API_KEY if the server wants a key",
        ) from error
    return found


def spark(values: Sequence[float | None], width: int, blocks: str = BLOCKS) -> str:
    """The values as a line of blocks; a place without values is blank."""
    width = max(1, min(width, len(values)))
    bounds = [round(place * len(values) / width) for place in range(width + 1)]
    means = []
    for low, high in itertools.pairwise(bounds):
        part = [value for value in values[low:high] if value is not None]
        means.append(sum(part) / len(part) if part else None)
    known = [mean for mean in means if mean is not None]
    least, span = min(known, default=0), max(known, default=0) - min(known, default=0)
    top = len(blocks) - 1
    return "".join(
        " " if mean is None else blocks[round((mean - least) / span * top) if span else top // 2]
        for mean in means
    )


def panels(source: Source, width: int, blocks: str = BLOCKS) -> list[tuple[str, list[str]]]:
    """The title and the lines of each panel."""
    about = source.overview()
    columns = about["columns"]
    parts = [name for name in columns if name.startswith(("train/", "val/"))]
    others = [name for name in parts if name not in (_REWARD, _SPREAD, _VALIDATION)][:MOST_LINES]
    kinds = ("dropped", "truncated", "/lost_")
    lost = [name for name in columns if any(kind in name for kind in kinds)][:MOST_LINES]
    rewards = [_REWARD, _SPREAD, _VALIDATION, *others]
    found = source.series([*rewards, _TRAINABLE, *lost])["series"]
    label = max(len(_label(name)) for name in (*rewards, _TRAINABLE, *lost))

    def lines(names: Sequence[str]) -> list[str]:
        rows = [(name, found.get(name) or []) for name in names]
        return [
            _line(name, values, label, width, blocks)
            for name, values in rows
            if any(value is not None for value in values)
        ]

    return [
        (_title(about), _verdict(about)),
        ("Steps", _steps(source.steps(), width, blocks)),
        ("Reward", lines(rewards) or ["No reward yet"]),
        ("Signal", lines([_TRAINABLE, *lost]) or ["No trained step yet"]),
    ]


def _title(about: Json) -> str:
    run, state = about["run"], about["verdict"]["state"]
    return "  ".join(filter(None, (f"{run['project']}/{run['name']}", run["base_model"], state)))


def _verdict(about: Json) -> list[str]:
    verdict = about["verdict"]
    found = [str(sentence) for sentence in verdict["sentences"]]
    for finding in verdict["findings"]:
        found += [f"! {finding['problem']}", f"  {finding['hint']}"]
    return [*found, *(f"? {sentence}" for sentence in about["missing"])]


def _steps(found: Json, width: int, blocks: str) -> list[str]:
    if not found["step"]:
        return ["No step yet"]
    first, last = found["step"][0], found["step"][-1]
    bar = spark(found["reward"], width - len(f"{first}  {last}"), blocks)
    return [f"{first} {bar} {last}", step_line(found, -1)]


def step_line(found: Json, place: int) -> str:
    """One step in a line, for a pipe."""

    def number(name: str, form: str = ".3f") -> str:
        value = found[name][place]
        return "-" if value is None else f"{value:{form}}"

    return (
        f"step {found['step'][place]}  reward {number('reward')}  trainable "
        f"{number('trainable', 'g')}/{number('groups', 'g')} groups  "
        f"{number('attempts', 'g')} attempts  {number('seconds', '.1f')} s"
    )


def _line(name: str, values: Sequence[float | None], label: int, width: int, blocks: str) -> str:
    known = [value for value in values if value is not None]
    change = f"{known[-1]:9.3f} {known[-1] - known[0]:+9.3f}  "
    return f"{_label(name):<{label}} {change}{spark(values, width - label - 22, blocks)}"


def _label(name: str) -> str:
    short = name.removeprefix("data/").removeprefix("step_num_").removeprefix("train/")
    return _LABELS.get(name) or _plain(short.replace("_", " "))


def _plain(text: str) -> str:
    """Text without control characters, which could move the cursor or change colours."""
    return _CONTROL.sub("?", text)


def draw(source: Source, console: Console) -> list[Text]:
    """All panels, as wide as the console."""
    blocks = ASCII if console.options.ascii_only else BLOCKS
    parts: list[Text] = []
    for title, lines in panels(source, console.width, blocks):
        parts.append(Text(_plain(title), style="bold"))
        parts += [Text(_plain(line)) for line in lines]
        parts.append(Text())
    return parts[:-1]


def watch(
    source: Source,
    console: Console,
    *,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the panels and follow the run until Ctrl-C: in place, or in a pipe a line per step."""
    if once or not console.is_terminal:
        for line in draw(source, console):
            console.print(line, soft_wrap=not console.is_terminal)
        if not once:
            _follow_lines(source, console, sleep)
        return
    with Live(Group(*draw(source, console)), console=console, auto_refresh=False) as live:
        while True:
            sleep(INTERVAL)
            try:
                live.update(Group(*draw(source, console)), refresh=True)
            except TrainerError as error:  # the server restarts, or the disk is away
                live.update(Text(f"{error.message}; trying again"), refresh=True)


def _follow_lines(source: Source, console: Console, sleep: Callable[[float], None]) -> None:
    shown = source.steps()["step"][-1:]
    while True:
        sleep(INTERVAL)
        try:
            found = source.steps()
        except TrainerError:
            continue  # the next look may succeed
        for place, step in enumerate(found["step"]):
            if not shown or step > shown[0]:
                console.print(step_line(found, place), highlight=False, soft_wrap=True)
        shown = found["step"][-1:] or shown
