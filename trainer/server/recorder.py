"""Keeps the attempts and tokens of every step for the page, in a thread and within a bound.

It is best effort: whatever fails is a warning in the log and never touches training.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.state_dir import BATCHES, MODEL_GLOB, step_name
from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import ServerConfig
from trainer.page import batches
from trainer.page.batches import TRAIN, Group
from trainer.server.attempts import groups_of, logged_groups
from trainer.server.journal import JournaledRequest
from trainer.server.learner_tokens import read

logger = logging.getLogger(__name__)
WAITING = 8
"""Steps that wait to be written at most; a disk that is slower than training loses some."""


class Recorder:
    """Writes the files of steps, one after the other. A limit of 0 keeps none."""

    def __init__(self, config: ServerConfig, tokenizer: Callable[[], Tokenizer]) -> None:
        self._state = config.state_path
        self._limit = int(config.keep_rollouts)
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting = threading.Semaphore(WAITING)
        self._lost = 0

    def step_served(self, directory: Path, request: JournaledRequest) -> None:
        """Keep a trained step; returns at once."""
        self._submit(f"step {request.step} of {directory.name}", self._keep, directory, request)

    def logged(self, directory: Path, step: int, groups: list[Json], split: str) -> None:
        """Keep the groups that a client logged at `step`; training keeps its own."""
        if split != TRAIN:
            what = f"`{split}` of step {step} of {directory.name}"
            self._submit(what, self._keep_logged, directory, step, groups, split)

    async def written(self) -> None:
        """Wait until all steps so far are written: the pool has one thread."""
        with contextlib.suppress(RuntimeError):  # the server stops
            await asyncio.wrap_future(self._pool.submit(lambda: None))

    async def stop(self) -> None:
        """Wait until everything is written; a second call does nothing."""
        await asyncio.to_thread(self._pool.shutdown)

    def _submit(self, what: str, work: Callable[..., None], *arguments: object) -> None:
        if not self._limit:
            return
        if not self._waiting.acquire(blocking=False):
            self._lost += 1
            if self._lost == 1:  # a client may log faster than any disk writes
                logger.warning("%s is not kept for the page: the disk is too slow", what)
            return
        if self._lost > 1:
            logger.warning("%s more were not kept for the page", self._lost - 1)
        self._lost = 0

        def run() -> None:
            try:
                work(*arguments)
                prune(self._state, self._limit)
            except Exception as error:
                logger.warning("%s is not kept for the page: %s", what, error)
            finally:
                self._waiting.release()

        try:
            self._pool.submit(run)
        except RuntimeError:  # the server stops
            self._waiting.release()

    def _keep(self, directory: Path, request: JournaledRequest) -> None:
        path = directory / BATCHES / f".{step_name(request.step)}.npz"
        try:
            tokens = read(path, request.step)
            groups = groups_of(request, tokens)
            about = {"step": request.step, "config": request.config, "model": request.model}
            self._write(directory, about, groups, TRAIN)
        finally:
            path.unlink(missing_ok=True)

    def _keep_logged(self, directory: Path, step: int, groups: list[Json], split: str) -> None:
        self._write(directory, {"step": step}, logged_groups(groups), split)

    def _write(self, directory: Path, about: Json, groups: list[Group], split: str) -> None:
        pieces = self._decode(groups)
        batches.write(
            batches.path_of(directory, about["step"], split), about, groups, pieces, split=split
        )

    def _decode(self, groups: list[Group]) -> dict[int, str]:
        """The text of each token id; a part of a character has no text of its own."""
        ids = {
            token
            for group in groups
            for attempt in group.attempts
            for sequence in attempt.sequences
            for token in sequence.ids
        }
        if new := ids - self._pieces.keys():
            tokenizer = self._tokenizer()
            self._pieces |= {token: tokenizer.decode([token]) for token in new}
        return {token: self._pieces[token] for token in ids}


def prune(state: Path, limit: int) -> None:
    """Delete the files of the oldest steps until all take at most `limit` bytes."""
    found = []
    for path in state.glob(f"{MODEL_GLOB}/{BATCHES}/*.db"):
        try:
            about = path.stat()
        except OSError:  # deleted with its run
            continue
        found.append((about.st_mtime_ns, about.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size
