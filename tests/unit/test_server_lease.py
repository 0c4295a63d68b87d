"""A server exits when its lease is over, and names the checkpoints that nobody pulled."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.config import ServerConfig
from trainer.server import lease
from trainer.server.lease import unpulled_checkpoints, unpulled_warnings, watch_lease


def idle_server() -> tuple[SimpleNamespace, SimpleNamespace]:
    """A backend that did nothing for an hour, and its server."""
    backend = SimpleNamespace(busy=False, last_activity=time.monotonic() - 3600)
    return backend, SimpleNamespace(should_exit=False)


@pytest.mark.parametrize("worked", [True, False])
async def test_a_long_step_does_not_count_as_idle_time_when_it_ends(worked: bool) -> None:
    backend, server = idle_server()
    backend.busy = worked
    config = ServerConfig(exit_when_idle=30)
    watching = asyncio.create_task(watch_lease(config, backend, server, interval=0))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    backend.busy = False
    await asyncio.sleep(0.01)
    assert server.should_exit is not worked
    watching.cancel()


@pytest.mark.parametrize("clock", [0, 7 * 24 * 3600, -7 * 24 * 3600])
@pytest.mark.parametrize("pulling", [True, False])
@pytest.mark.parametrize("under_home", [True, False])
async def test_a_server_stays_while_its_checkpoints_are_pulled_whatever_the_wall_clock_says(
    pulling: bool,
    under_home: bool,
    clock: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = tmp_path / "state"
    state.mkdir()
    mark = state / "pulled"
    mark.write_text("")  # an earlier pull
    changed = time.time() - clock  # the clock is set forward or back after the mark was written
    os.utime(mark, (changed, changed))
    now = [0.0]
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: now[0]))
    backend, server = SimpleNamespace(busy=False, last_activity=0.0), idle_server()[1]
    config = ServerConfig(exit_when_idle=1, state_dir="~/state" if under_home else str(state))
    watching = asyncio.create_task(watch_lease(config, backend, server, interval=0))  # type: ignore[arg-type]
    for number in range(1, 5):
        now[0] += 40  # seconds of 60
        if pulling:
            os.utime(mark, (changed, changed + number))
        for _ in range(10):
            await asyncio.sleep(0)
    assert server.should_exit is not pulling
    now[0] += 61  # the pull is over
    await asyncio.wait_for(watching, 60)


@pytest.mark.parametrize("under_home", [True, False])
def test_only_trained_checkpoints_that_nobody_pulled_are_named(
    under_home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = tmp_path / "state"
    for step in ("0000", "0001", "0002", ".0003-half"):
        (state / "p/models/m/checkpoints" / step).mkdir(parents=True)
    assert unpulled_checkpoints(state) == ["p/m/0001", "p/m/0002"]
    config = ServerConfig(state_dir="~/state" if under_home else str(state))
    (state / "pulled").write_text("p/m/0000\np/m/0001\n")
    lost, advice = unpulled_warnings(config)
    assert "NOT PULLED" in lost and lost.endswith("1 checkpoint: p/m/0002")
    assert "launcher pull" in advice
    assert unpulled_warnings(config.model_copy(update={"bucket": "s3://b"})) == [
        "not pulled, but safe in s3://b: 1 checkpoint: p/m/0002"
    ]
    (state / "pulled").write_text("p/m/0001\np/m/0002\n")
    assert unpulled_warnings(config) == []
