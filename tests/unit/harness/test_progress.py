import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console

from trainer.harness import progress as module
from trainer.harness.progress import ConsoleLines, Progress
from trainer.harness.types import Example, WorkflowRun

RUN = WorkflowRun(Example("e", "q", "a", {}), 0)


def draw(console: Console) -> str:
    with Progress(console) as progress:
        progress.begin(total=4, done=1)
        progress.phase("sampling", 2)
        progress.run_done(RUN)
        progress.training(2)
        progress.epoch_done(0.5, 0.75)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_reward_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each look at the clock takes 5 s. One epoch of 15 s is done, and two are left.
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    drawn = draw(Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None))
    assert "epochs" in drawn and "2/4" in drawn
    assert "reward 0.500, validation 0.750, 0:30 left" in drawn


def test_a_pipe_shows_no_bar() -> None:
    assert draw(Console(file=io.StringIO(), force_terminal=False)).strip() == ""


def test_lines_look_like_the_guides_and_never_wrap() -> None:
    console = Console(file=io.StringIO(), width=20)
    record = logging.LogRecord("x", logging.INFO, "", 0, "Starting %s [bold] runs", (9,), None)
    ConsoleLines(console).emit(record)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "INFO - Starting 9 [bold] runs\n"
