"""Writes the report of each pulled run beside its checkpoints, if it can."""

import logging
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kit.state_dir import model_path
from launcher.checkpoints import PulledCheckpoint

logger = logging.getLogger(__name__)
REPORT = "report.html"
TIMEOUT = 120.0


def write_reports(pulled: Iterable[PulledCheckpoint], to: Path) -> list[Path]:
    """Write a report for every run that was pulled to `to`, and return those that succeeded."""
    written = []
    for project, model in dict.fromkeys((one.project, one.model) for one in pulled):
        path = model_path(to, project, model) / REPORT
        # A process of its own: the launcher never imports the trainer, and whatever goes wrong
        # there must not end `down`. `-P`: the user's own `trainer.py` is not ours.
        command = [sys.executable, "-P", "-m", "trainer", "report", f"{project}/{model}"]
        command += ["--state-dir", str(to), "-o", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("No report of `%s/%s`: %s", project, model, error)
            continue
        if done.returncode == 0 and path.is_file():
            written.append(path)
        else:
            why = " ".join(done.stderr.split())[-300:]
            logger.warning("No report of `%s/%s`: %s", project, model, why)
    return written
