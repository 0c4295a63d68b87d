"""Answers of the API that are computed once for all open pages, as long as no file changes.

After each change every page asks for the same things. An answer is used again only for the same
address and the same files, so it is never older than one that is computed.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from kit.errors import KitError
from kit.files import identity
from kit.manifest import MANIFEST
from kit.state_dir import BATCHES, CHECKPOINTS, EVALS, GROUPS, HISTORY, checkpoint_path
from trainer.page import batches
from trainer.page.reader import Run, Runs

MOST_BYTES = 16 << 20
RUN = "/api/runs/{project}/{name}"
NOT_HELD = (f"{RUN}/logs", f"{RUN}/checkpoints")
"""Routes that read files which no version covers: every log, every manifest."""
_JSON = "application/json"
_ENTRY = 500
"""Bytes that an answer takes besides its text, about."""
Version = tuple[Hashable, ...]
State = Callable[[str, str], str | None]


@dataclass(frozen=True)
class _Held:
    version: Version
    body: bytes
    headers: dict[str, str]


class Cache:
    """Answers by address, the least used dropped first. It belongs to one event loop."""

    def __init__(self, runs: Runs, state: State, *, most_bytes: int = MOST_BYTES) -> None:
        """`state` says what a run does now, which the overview shows."""
        self._runs = runs
        self._state = state
        self._most = most_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.size = 0

    async def answer(
        self, route: str, request: Request, compute: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """The answer to a request: one that is held, or else what `compute` returns."""
        version = None
        if route.startswith(RUN) and route not in NOT_HELD:
            version = await run_in_threadpool(self._version, route, request)
        if version is None:
            return _checked(request, _tagged(await compute(request)))
        key = f"{request.url.path}?{request.url.query}"
        # Pages that ask at the same moment wait for the first. If it is cancelled, the next one
        # computes.
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            held = self._held.get(key)
            if held is None or held.version != version:
                answer = _tagged(await compute(request))
                if answer.status_code != 200:
                    return answer
                held = _Held(version, bytes(answer.body), dict(answer.headers))
                self._hold(key, held)
            else:
                self._held.move_to_end(key)
        return _checked(request, Response(held.body, headers=held.headers))

    def _hold(self, key: str, held: _Held) -> None:
        self._drop(key)
        if _size(key, held) > self._most // 4:
            return
        self._held[key] = held
        self.size += _size(key, held)
        while self.size > self._most:
            self._drop(next(iter(self._held)))

    def _drop(self, key: str) -> None:
        if held := self._held.pop(key, None):
            self.size -= _size(key, held)

    def _version(self, route: str, request: Request) -> Version | None:
        """What changes whenever the answer could; None if that is not certain."""
        asked, query = request.path_params, request.query_params
        try:
            run = self._runs.get(asked["project"], asked["name"])
            paths = _files(run)
            if "step" in asked:
                split = query.get("split", batches.TRAIN)
                paths.append(batches.path_of(run.directory, int(asked["step"]), split))
            if other := query.get("other"):
                project, _, name = other.partition("/")
                paths += _files(self._runs.get(project, name))
        except (KitError, OSError, ValueError):
            return None  # the route says what is wrong
        state = self._state(run.project, run.name) if route == RUN else None
        found: list[Hashable] = [run.directory, state]
        for path in paths:
            try:
                stamp, settled = identity(path)
            except (OSError, ValueError):  # a split may hold any character
                stamp, settled = (), True  # its directory changes when it is made
            if not settled:
                return None
            found.append(stamp)
        return tuple(found)


def _files(run: Run) -> list[Path]:
    """The files and directories from which every answer about a run is made."""
    folder = run.directory
    newest = run.newest_checkpoint()
    return [
        *(folder, folder / HISTORY, folder / CHECKPOINTS, folder / BATCHES),
        *(folder / BATCHES / GROUPS, folder / EVALS, *sorted((folder / EVALS).glob("*.jsonl"))),
        *([checkpoint_path(folder, newest) / MANIFEST] if newest is not None else []),
    ]


def _size(key: str, held: _Held) -> int:
    return len(held.body) + len(key) + _ENTRY


def _tagged(answer: Response) -> Response:
    """Name the content of a JSON answer, so that a browser that has it need not get it again."""
    if answer.status_code == 200 and answer.media_type == _JSON:
        digest = hashlib.blake2b(answer.body, digest_size=12).hexdigest()
        answer.headers["ETag"] = f'"{digest}"'
    return answer


def _checked(request: Request, answer: Response) -> Response:
    """The answer, or 304 without a body if the browser says that it has it."""
    tag = answer.headers.get("ETag")
    known = request.headers.get("If-None-Match", "")
    if tag is None or tag not in (one.strip().removeprefix("W/") for one in known.split(",")):
        return answer
    headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
    return Response(status_code=304, headers=headers)
