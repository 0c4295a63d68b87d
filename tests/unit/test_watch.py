"""`trainer watch` on a directory and on a server's API, in a terminal and a pipe; `report`."""

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from click.testing import CliRunner
from rich.console import Console

from kit.errors import KitError
from trainer.cli import cli
from trainer.page.events import Events
from trainer.page.reader import Runs
from trainer.page.view import bind, create_app
from trainer.page.watch import OnDisk, OnServer, spark, watch


def write_step(state: Path, step: int) -> None:
    run = state / "demo/models/nice"
    run.mkdir(parents=True, exist_ok=True)
    row = {
        "step": step, "train/reward": step / 10, "train/reward_std_dev": 0.2, "val/reward": 0.5,
        "train/polite\x1b[31m": 1.0, "num_gradient_steps": 1, "time/step_s": 2.5,
        "data/step_num_groups_trainable": 3, "data/step_num_groups_submitted": 4,
        "data/step_num_trajectories": 16, "recorded_at": 1000.0 + step,
    }  # fmt: skip
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for step in range(1, 9):
        write_step(tmp_path, step)
    return tmp_path


def test_blocks_rise_with_the_values_and_a_gap_is_blank() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([0, 0, 7, 7], 2) == "▁█"
    assert spark([0, None, 1], 80) == "▁ █"
    assert spark([], 10) == " " and len(spark([1.0] * 100, 10)) == 10


@pytest.mark.parametrize("width", [80, 200])
def test_the_four_panels_fit_the_terminal(state: Path, width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    watch(OnDisk.find(state, "nice"), console, once=True)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("demo/nice") and lines[0].endswith("training")
    assert [line for line in lines if line in ("Steps", "Reward", "Signal")] == [
        "Steps", "Reward", "Signal",
    ]  # fmt: skip
    assert max(map(len, lines)) <= width
    reward = next(line for line in lines if line.startswith("training "))
    assert "0.800" in reward and "+0.700" in reward and reward.rstrip().endswith("▁▂▃▄▅▆▇█")
    assert "step 8  reward 0.800  trainable 3/4 groups  16 attempts  2.5 s" in lines
    assert "\x1b" not in file.getvalue()  # not even from the name of a metric


def test_a_pipe_gets_a_line_for_each_new_step(state: Path) -> None:
    file, looks = io.StringIO(), iter([9, 10])

    def sleep(_: float) -> None:
        step = next(looks, None)
        if step is None:
            raise KeyboardInterrupt
        write_step(state, step)

    with pytest.raises(KeyboardInterrupt):
        watch(OnDisk.find(state, None), Console(file=file), sleep=sleep)
    assert [line.split()[1] for line in file.getvalue().splitlines() if "16 attempts" in line] == [
        "8", "9", "10",
    ]  # fmt: skip


def test_a_terminal_is_redrawn_in_place(state: Path) -> None:
    file, looks = io.StringIO(), iter([9])

    def sleep(_: float) -> None:
        write_step(state, next(looks))

    console = Console(file=file, width=80, height=40, force_terminal=True, color_system=None)
    with pytest.raises((StopIteration, RuntimeError)):
        watch(OnDisk.find(state, None), console, sleep=sleep)
    assert "step 9  reward 0.900" in file.getvalue() and "\x1b[1A" in file.getvalue()


@pytest.fixture
def address(state: Path) -> Iterator[str]:
    bound = bind(0)
    runs = Runs(state)
    app = create_app(runs, Events(runs), version="0")
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    bound.listen(8)
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    bound.close()


def test_a_server_shows_the_same_as_its_directory(state: Path, address: str) -> None:
    shown = []
    for source in (OnDisk.find(state, None), OnServer.find(address, "demo/nice")):
        file = io.StringIO()
        watch(source, Console(file=file, width=100), once=True)
        shown.append(file.getvalue().splitlines()[1:])  # the state of a view is `ended`
    assert shown[0] == shown[1] and len(shown[0]) > 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "There is no run `nobody` in"),
        (["--url", "http://127.0.0.1:9"], "Cannot read `http://127.0.0.1:9/api/runs`"),
    ],
    ids=str,
)
def test_bad_input_is_told_in_one_sentence(state: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["watch", "--state-dir", str(state), *arguments])
    assert isinstance(result.exception, KitError) and message in result.exception.message
    assert result.exception.hint


def test_report_writes_one_file_and_prints_its_path(state: Path) -> None:
    output = state / "reports/nice.html"
    where = ["--state-dir", str(state), "-o", str(output)]
    result = CliRunner(mix_stderr=False).invoke(cli, ["report", "demo/nice", *where, "--json"])
    assert json.loads(result.stdout) == {"report": str(output)}
    assert output.read_text().startswith("<!doctype html>") and "nice" in output.read_text()
    (state / "file").write_text("")
    where[-1] = str(state / "file/report.html")
    for name, message in (("nobody", "There is no run"), ("nice", "cannot be written")):
        failed = CliRunner().invoke(cli, ["report", name, *where])
        assert isinstance(failed.exception, KitError) and message in failed.exception.message
