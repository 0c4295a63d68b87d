"""A server exits when its lease is over, and names the checkpoints that nobody pulled."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.config import ServerConfig
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


@pytest.mark.parametrize("pulling", [True, False])
@pytest.mark.parametrize("under_home", [True, False])
async def test_a_server_stays_while_its_checkpoints_are_pulled(
    pulling: bool, under_home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = tmp_path / "state"
    state.mkdir()
    if pulling:
        (state / "pulled").write_text("demo/m/0001\n")
    backend, server = idle_server()
    config = ServerConfig(exit_when_idle=30, state_dir="~/state" if under_home else str(state))
    watching = asyncio.create_task(watch_lease(config, backend, server, interval=0))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert server.should_exit is not pulling
    watching.cancel()


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
