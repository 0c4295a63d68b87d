"""A server exits when it was idle for long enough, and what it does counts until it ends."""

import asyncio
import time
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
