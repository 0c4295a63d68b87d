"""The lease of a server: when it exits by itself, and which checkpoints are lost if it does."""

import asyncio
import logging
import math
import time
from pathlib import Path

import uvicorn

from kit.state_dir import CHECKPOINT_GLOB, PULLED, checkpoint_name
from trainer.config import ServerConfig
from trainer.server.backend import Backend

logger = logging.getLogger(__name__)


async def watch_lease(
    config: ServerConfig, backend: Backend, server: uvicorn.Server, *, interval: float = 1
) -> None:
    """Make the server exit once it is idle or out of lease; SkyPilot's autostop does the rest."""
    started = time.monotonic()
    pulls = PullWatch(config.state_path)
    while True:
        await asyncio.sleep(interval)
        now = time.monotonic()
        if backend.busy:
            backend.last_activity = now
        idle = (now - max(backend.last_activity, pulls.last_sign(now))) / 60
        if config.exit_when_idle and idle >= config.exit_when_idle:
            logger.warning("exiting: nothing was sampled or trained for %.0f minutes", idle)
            break
        if config.max_hours and now - started >= config.max_hours * 3600:
            logger.warning("exiting: the lease of %s hours is over", config.max_hours)
            break
    server.should_exit = True


class PullWatch:
    """Notices when `launcher pull` writes its mark, which it repeats while bytes arrive.

    Only a change of the mark counts, not its age: a wall clock that is set forward cannot hide a
    pull, and one that is set back cannot make an old pull last.
    """

    def __init__(self, state: Path) -> None:
        self._mark = state / PULLED
        self._seen = self._written()
        self._last_sign = -math.inf

    def last_sign(self, now: float) -> float:
        """The time, of the clock of `now`, when a pull last gave a sign."""
        written = self._written()
        if written != self._seen:
            self._seen, self._last_sign = written, now
        return self._last_sign

    def _written(self) -> int:
        try:
            return self._mark.stat().st_mtime_ns
        except OSError:
            return 0


def unpulled_warnings(config: ServerConfig) -> list[str]:
    """Log lines about checkpoints that nobody pulled; none if every checkpoint is safe."""
    names = unpulled_checkpoints(config.state_path)
    if not names:
        return []
    checkpoints = f"{len(names)} checkpoint{'s' * (len(names) > 1)}: {', '.join(names)}"
    if config.bucket:
        return [f"not pulled, but safe in {config.bucket}: {checkpoints}"]
    return [
        f"NOT PULLED, and lost when the cluster is torn down in a few minutes: {checkpoints}",
        "save them now with `launcher pull`",
    ]


def unpulled_checkpoints(state: Path) -> list[str]:
    """Trained checkpoints that nobody pulled, as PROJECT/NAME/STEP."""
    try:
        pulled = set((state / PULLED).read_text().split())
    except OSError:
        pulled = set()
    names = [
        checkpoint_name(path)
        for path in sorted(state.glob(CHECKPOINT_GLOB))
        if path.name.isdigit() and int(path.name) > 0  # step 0 is created untrained
    ]
    return [name for name in names if name not in pulled]
