"""Tells open pages which runs changed. One task looks at the files, whatever the number of pages.

A page that reads too slowly loses its oldest events; it asks for everything new anyway.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from kit.state_dir import BATCHES, EVALS, HISTORY
from kit.types import Json
from trainer.page.reader import Runs

INTERVAL = 1.0
QUIET = 15.0
"""Seconds without an event after which a comment shows that the connection is open."""
WAITING = 64
"""Events that wait for one page at most."""
MOST_CLIENTS = 32
_Seen = dict[tuple[str, str], tuple[int, ...]]


class Events:
    """The pages that listen, and the task that looks for changes while there are any."""

    def __init__(self, runs: Runs, *, interval: float = INTERVAL) -> None:
        self._runs = runs
        self._interval = interval
        self._clients: set[asyncio.Queue[Json | None]] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        return len(self._clients) >= MOST_CLIENTS

    def stop(self) -> None:
        """End every stream, so that a server which stops does not wait for its pages."""
        for queue in self._clients:
            _put(queue, None)

    async def stream(self) -> AsyncIterator[str]:
        """The lines of one page's stream, until it leaves or the server stops."""
        queue: asyncio.Queue[Json | None] = asyncio.Queue(WAITING)
        self._clients.add(queue)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield ": open\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), QUIET)
                except TimeoutError:
                    yield ": quiet\n\n"
                    continue
                if event is None:
                    return
                yield f"event: changed\ndata: {json.dumps(event)}\n\n"
        finally:
            self._clients.discard(queue)

    async def _look(self) -> None:
        seen: _Seen | None = None
        while self._clients:
            now = await asyncio.to_thread(self._versions)
            for project, name in [key for key, it in now.items() if seen and seen.get(key) != it]:
                step = await asyncio.to_thread(self._step, project, name)
                for queue in self._clients:
                    _put(queue, {"project": project, "name": name, "step": step})
            seen = now or seen or {("", ""): ()}
            await asyncio.sleep(self._interval)

    def _versions(self) -> _Seen:
        found = {}
        for run in self._runs.all():
            paths = [run.directory / HISTORY, run.directory / BATCHES]
            paths += sorted((run.directory / EVALS).glob("*.jsonl"))
            found[run.project, run.name] = tuple(_changed(path) for path in paths)
        return found

    def _step(self, project: str, name: str) -> int:
        with contextlib.suppress(Exception):  # a run that was deleted meanwhile
            return self._runs.get(project, name).step()
        return 0


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _put(queue: asyncio.Queue[Json | None], event: Json | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
