"""Runs of a local cluster: a directory each, and a process group while it is alive."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from launcher.provider import Run, RunStatus


def make_run(runs: Path, label: str) -> Path:
    """The directory of a new run, by the next number that no other command takes meanwhile."""
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(runs.iterdir())) + 1):
        directory = runs / str(number)
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            break
    about = directory / "about.new"
    about.write_text(json.dumps({"name": label}))
    about.rename(directory / "about.json")
    return directory


def read_run(directory: Path) -> Run:
    label = json.loads((directory / "about.json").read_text())["name"]
    pid = _pid(directory)  # first: who has ended by now has written its code
    if (directory / "exit").is_file():
        code = int((directory / "exit").read_text())
        status = RunStatus.SUCCEEDED if code == 0 else RunStatus.FAILED
    else:
        status = RunStatus.RUNNING if pid else RunStatus.CANCELLED
    return Run(directory.name, label, status)


def _pid(directory: Path) -> int | None:
    """The process of a run if it is alive: the number alone may be another process by now."""
    try:
        pid, _, when = (directory / "pid").read_text().partition(" ")
    except OSError:
        return None
    return int(pid) if when and born(int(pid)) == when else None


def born(pid: int) -> str:
    """When process `pid` started, or an empty string when there is none."""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def end(directory: Path, patience: float = 15.0) -> None:
    """End all processes of a run: ask them first, and after `patience` seconds insist.

    Its first one is gone at once, and a server still writes while it ends.
    """
    pid = _pid(directory)
    if pid is None:
        return
    deadline = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(pid)
        os.killpg(group, signal.SIGTERM)
        while _has_members(group) or _pid(directory):
            if time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
            time.sleep(0.1)


def _has_members(group: int) -> bool:
    """Whether a process of the group has not ended yet."""
    shown = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout
    found = (line.split() for line in shown.splitlines())
    return any(int(number) == group and not state.startswith("Z") for number, state in found)


def show(path: Path, *, follow: Callable[[], bool], tail: int, out: TextIO) -> None:
    """Write a text file to `out`, and what it grows by for as long as `follow` says."""
    with path.open(encoding="utf-8", errors="replace") as log:
        lines = log.readlines()
        out.writelines(lines[-tail:] if tail else lines)
        going = True
        while going:
            going = follow()  # before the read: no line is lost
            out.write(log.read())
            out.flush()
            if going:
                time.sleep(0.2)
