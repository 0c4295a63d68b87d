import io
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from trainer.harness import progress as module
from trainer.harness.history import REWARDS, set_aside
from trainer.harness.progress import EACH_EPOCH, LOG, ConsoleLines, Progress, log_to
from trainer.harness.types import Example, WorkflowRun

RUN = WorkflowRun(Example("e", "q", "a", {}), 0)


def draw(console: Console) -> str:
    with Progress(console) as progress:
        progress.begin(total=4, done=1)
        progress.phase("sampling", 2)
        progress.run_done(RUN)
        progress.training(2)
        progress.one_done(0.5, 0.75)
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


def test_a_terminal_shows_a_row_for_each_epoch_and_a_pipe_the_guides_lines() -> None:
    row = {
        "epoch": 1, "avg_reward": 0.25, "reward_std_dev": 0.1, "num_groups": 4,
        "filtered_groups": 3, "failures": {"workflow_failed": 2}, "metrics": {"characters": 7.0},
        "time/sample_s": 1.25, "time/train_s": 2.5, "time/validate_s": 0.5, "time/epoch_s": 4.3,
    }  # fmt: skip
    guide = logging.LogRecord("x", logging.INFO, "", 0, "Starting epoch 1", (), None)
    guide.each_epoch = True
    shown = {}
    for width in (80, 200):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        progress = Progress(console)
        progress.begin(20, 0)
        progress.epoch_row({"epoch": 0}, {"avg_reward": 0.5, "metrics": {"characters": 6.0}})
        progress.epoch_row(row, None)
        ConsoleLines(console).emit(guide)
        assert isinstance(console.file, io.StringIO)
        drawn = console.file.getvalue().splitlines()
        shown[width] = [line.split() for line in drawn]
        assert max(map(len, drawn)) <= width and len(drawn) == 3
    narrow, wide = shown[80], shown[200]
    assert narrow[0][:6] == ["epoch", "reward", "spread", "validation", "trainable", "lost"]
    assert narrow[0][-1] == "validate"
    assert narrow[1][:4] == ["0/20", "-", "-", "0.500"]
    assert narrow[2][:6] == ["1/20", "0.250", "0.100", "-", "3/4", "2"]
    assert wide[0][-1] == "characters" and wide[2][-3:] == ["4.3", "s", "7.000"]
    piped = Console(file=io.StringIO(), force_terminal=False)
    ConsoleLines(piped).emit(guide)
    Progress(piped).epoch_row(row, None)
    assert isinstance(piped.file, io.StringIO)
    assert piped.file.getvalue() == "INFO - Starting epoch 1\n"


def test_every_line_goes_to_the_log_file_also_after_it_was_moved(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    log_to(console, tmp_path)
    logger = logging.getLogger("trainer.harness.trainer")
    try:
        logger.info("one", extra=dict(EACH_EPOCH))
        (tmp_path / LOG).rename(tmp_path / "moved.log")
        logger.info("two", extra=dict(EACH_EPOCH))
    finally:
        log_to(Console(quiet=True))
    assert (tmp_path / "moved.log").read_text().endswith("INFO - one\n")
    assert (tmp_path / LOG).read_text().endswith("INFO - two\n")
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == ""


def test_lines_look_like_the_guides_and_never_wrap() -> None:
    console = Console(file=io.StringIO(), width=20)
    record = logging.LogRecord("x", logging.INFO, "", 0, "Starting %s [bold] runs", (9,), None)
    ConsoleLines(console).emit(record)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "INFO - Starting 9 [bold] runs\n"


def test_a_log_that_has_just_begun_is_not_a_previous_run(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("Nothing to resume\n")
    assert set_aside(tmp_path) is None and (tmp_path / LOG).exists()
    (tmp_path / REWARDS).write_text("[]")
    assert set_aside(tmp_path) == tmp_path / "previous" / "unknown"
    assert not (tmp_path / LOG).exists()
