"""A server exits when it was idle for long enough, and what it does counts until it ends."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.config import ServerConfig
from trainer.server.app import watch_lease


@pytest.mark.parametrize("worked", [True, False])
async def test_the_end_of_a_long_step_is_no_idle_time(worked: bool) -> None:
    backend = SimpleNamespace(busy=worked, last_activity=time.monotonic() - 3600)
    server = SimpleNamespace(should_exit=False)
    watching = asyncio.create_task(
        watch_lease(ServerConfig(exit_when_idle=30), backend, server, every=0)  # type: ignore[arg-type]
    )
    await asyncio.sleep(0.01)
    backend.busy = False
    await asyncio.sleep(0.01)
    assert server.should_exit is not worked
    watching.cancel()


@pytest.mark.parametrize("pulling", [True, False])
async def test_a_server_stays_while_its_checkpoints_are_pulled(
    pulling: bool, tmp_path: Path
) -> None:
    if pulling:
        (tmp_path / "pulled").write_text("demo/m/0001\n")
    backend = SimpleNamespace(busy=False, last_activity=time.monotonic() - 3600)
    server = SimpleNamespace(should_exit=False)
    config = ServerConfig(exit_when_idle=30, state_dir=str(tmp_path))
    watching = asyncio.create_task(watch_lease(config, backend, server, every=0))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert server.should_exit is not pulling
    watching.cancel()
