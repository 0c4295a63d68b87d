"""Calls over one connection, to a worker process or to another machine.

A call is `{"id", "method", "params"}`; its answers are any number of `{"id", "row"}`, then one
`{"id", "done"}` or `{"id", "error"}`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from kit.errors import KitError
from kit.types import Json
from trainer import errors
from trainer.errors import TrainerError
from trainer.processes.large_json import is_large, pieces


class Calls:
    """The calls under way; `write` sends a message, `died` is the error of a connection's end."""

    def __init__(self, write: Callable[[str], None], died: Callable[[], TrainerError]) -> None:
        self._write = write
        self._died = died
        self._answers: dict[int, asyncio.Queue[Json]] = {}
        self._next_id = 0

    async def call(self, method: str, **params: Any) -> Any:
        """Call `method` and return its result."""
        call, answers = self._send(method, json.dumps(params))
        try:
            while True:
                answer = await answers.get()
                if "row" not in answer:
                    return self._result(answer)
        finally:
            del self._answers[call]

    async def stream(self, method: str, **params: Any) -> AsyncIterator[Json]:
        """Call `method` and yield its rows; one that is left early is cancelled."""
        if any(map(is_large, params.values())):  # a step's groups: others are answered meanwhile
            text = await asyncio.to_thread(lambda: "".join(pieces(params)))
        else:
            text = json.dumps(params)
        call, answers = self._send(method, text)
        answer: Json = {"row": {}}
        try:
            while "row" in (answer := await answers.get()):
                yield answer["row"]
            self._result(answer)
        finally:
            del self._answers[call]
            if "row" in answer:
                with contextlib.suppress(TrainerError):  # who is gone has nothing to cancel
                    self._write(_message(call, "cancel", "{}"))

    def take(self, answer: Json) -> None:
        """Give an answer that has come to the call that waits for it, if one still does."""
        if queue := self._answers.get(answer["id"]):
            queue.put_nowait(answer)

    def end(self) -> None:
        """No answer comes any more: every call under way fails."""
        for queue in self._answers.values():
            queue.put_nowait({"error": None})

    def _send(self, method: str, params: str) -> tuple[int, asyncio.Queue[Json]]:
        self._next_id += 1
        call, answers = self._next_id, asyncio.Queue[Json]()
        self._write(_message(call, method, params))
        self._answers[call] = answers
        return call, answers

    def _result(self, answer: Json) -> Any:
        if "error" not in answer:
            return answer["done"]
        if answer["error"] is None:
            raise self._died()
        raise read_error(answer["error"])


def _message(call: int, method: str, params: str) -> str:
    return f'{{"id": {call}, "method": "{method}", "params": {params}}}'


def write_error(error: Exception) -> Json:
    """An error as it travels; one that is not ours becomes a TrainerError."""
    if not isinstance(error, KitError):
        error = TrainerError(f"{type(error).__name__}: {error}")
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


def read_error(told: Json) -> TrainerError:
    """The error that `write_error` wrote."""
    kind = getattr(errors, str(told["type"]), TrainerError)
    if not (isinstance(kind, type) and issubclass(kind, TrainerError)):
        kind = TrainerError
    return kind(str(told["message"]), hint=str(told["hint"]))
