"""Runs of a local cluster. Each is a directory, and a process group while it is alive."""

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
    """Create the directory of a new run, named by the next free number."""
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(runs.iterdir())) + 1):
        directory = runs / str(number)
        with contextlib.suppress(FileExistsError):  # another command was faster
            directory.mkdir()
            break
    about = directory / "about.new"
    about.write_text(json.dumps({"name": label}))
    about.rename(directory / "about.json")
    return directory


def read_run(directory: Path) -> Run:
    label = _label(directory)
    pid = _pid(directory)  # before the exit code: a process that has ended has written it
    if (directory / "exit").is_file():
        code = _exit_code(directory)
        status = RunStatus.SUCCEEDED if code == 0 else RunStatus.FAILED
    else:
        status = RunStatus.RUNNING if pid else RunStatus.CANCELLED
    return Run(directory.name, label, status)


def _label(directory: Path) -> str:
    """The run's name. One that cannot be read any more hides no run: `down` has to end it."""
    try:
        return str(json.loads((directory / "about.json").read_text())["name"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "unknown"


def _exit_code(directory: Path) -> int:
    try:
        return int((directory / "exit").read_text())
    except ValueError:
        return 1  # it ended, and nobody knows how


def _pid(directory: Path) -> int | None:
    """The process id of a run that is alive. The start time shows whether the id was reused."""
    try:
        pid, _, started = (directory / "pid").read_text().strip().partition(" ")
        now = start_time(int(pid))
    except (OSError, ValueError):
        return None
    # The run itself writes the id; a launcher that was killed has not added the time.
    return int(pid) if now and started in ("", now) else None


def start_time(pid: int) -> str:
    """The start time of process `pid`, or an empty string if there is no such process.

    Neither a change of the clock nor another time zone or language changes it.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return f"{boot}/{fields[19]}"  # in clock ticks since the boot
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    plain = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, env=plain).stdout.strip()


def stop_run(directory: Path, patience: float = 15.0) -> None:
    """Terminate all processes of a run, and kill those left after `patience` seconds.

    Waits for the whole group: its first process exits at once, while a server still writes files.
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
    """Whether the group has a process that is still alive."""
    output = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout
    processes = (line.split() for line in output.splitlines())
    return any(int(number) == group and not state.startswith("Z") for number, state in processes)


def follow_file(path: Path, *, follow: Callable[[], bool], tail: int, out: TextIO) -> None:
    """Write the last `tail` lines of a text file to `out` (0: all), and new ones while `follow`."""
    with path.open(encoding="utf-8", errors="replace") as log:
        lines = log.readlines()
        out.writelines(lines[-tail:] if tail else lines)
        following = True
        while following:
            following = follow()  # before the read, so that no line is lost
            out.write(log.read())
            out.flush()
            if following:
                time.sleep(0.2)
