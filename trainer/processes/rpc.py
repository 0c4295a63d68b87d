"""A small RPC protocol: JSON messages over one connection, to a worker or to another machine.

A call is `{"id", "method", "params"}`. Its replies are any number of `{"id", "row"}` messages,
then one `{"id", "done"}` or `{"id", "error"}`. `RpcClient` makes calls over any connection;
`RpcServer` answers them over a socket, one JSON object a line.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from kit.errors import KitError
from kit.types import Json
from trainer import errors
from trainer.errors import TrainerError

logger = logging.getLogger(__name__)
CHUNK = 1 << 20  # bytes


class RpcClient:
    """Make calls and match each reply to its call.

    `write` sends one message. `connection_error` returns the error for calls that are still
    waiting when the connection ends.
    """

    def __init__(
        self, write: Callable[[str], None], connection_error: Callable[[], TrainerError]
    ) -> None:
        self._write = write
        self._connection_error = connection_error
        self._replies: dict[int, asyncio.Queue[Json]] = {}
        self._next_id = 0

    async def call(self, method: str, **params: Any) -> Any:
        """Call `method` and return its result."""
        call, replies = self._send(method, json.dumps(params))
        try:
            while True:
                reply = await replies.get()
                if "row" not in reply:
                    return self._result(reply)
        finally:
            del self._replies[call]

    async def stream(self, method: str, **params: Any) -> AsyncIterator[Json]:
        """Call `method` and yield its rows. Closing the iterator early cancels the call."""
        call, replies = self._send(method, json.dumps(params))
        reply: Json = {"row": {}}
        try:
            while "row" in (reply := await replies.get()):
                yield reply["row"]
            self._result(reply)
        finally:
            del self._replies[call]
            if "row" in reply:
                with contextlib.suppress(TrainerError):  # the other end may be gone
                    self._write(_message(call, "cancel", "{}"))

    def receive(self, reply: Json) -> None:
        """Pass a reply to the call that waits for it, if it still does."""
        if queue := self._replies.get(reply["id"]):
            queue.put_nowait(reply)

    def fail_all(self) -> None:
        """Fail every waiting call, because the connection has ended."""
        for queue in self._replies.values():
            queue.put_nowait({"error": None})

    def _send(self, method: str, params: str) -> tuple[int, asyncio.Queue[Json]]:
        self._next_id += 1
        call, replies = self._next_id, asyncio.Queue[Json]()
        self._write(_message(call, method, params))
        self._replies[call] = replies
        return call, replies

    def _result(self, reply: Json) -> Any:
        if "error" not in reply:
            return reply["done"]
        if reply["error"] is None:
            raise self._connection_error()
        raise read_error(reply["error"])


class RpcServer:
    """Receive calls over a blocking socket, and send replies to them by their id."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self.open = True

    def poll(self, *, wait: bool) -> Iterator[tuple[int, str, Json]]:
        """Yield id, method and parameters of the calls received; `wait` for at least one."""
        self._socket.setblocking(wait)
        try:
            while self.open and b"\n" not in self._buffer[-CHUNK:]:
                self._receive()
            self._socket.setblocking(False)
            while self.open:
                self._receive()
        except BlockingIOError:
            pass
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            call = json.loads(line)
            yield call["id"], call["method"], call["params"]

    def _receive(self) -> None:
        chunk = self._socket.recv(CHUNK)
        self._buffer += chunk
        self.open = bool(chunk)

    def send_row(self, call: int, row: Json) -> None:
        self._write({"id": call, "row": row})

    def send_result(self, call: int, result: Any = None) -> None:
        self._write({"id": call, "done": result})

    def send_error(self, call: int, error: Exception) -> None:
        """Send an error; one that is not a `KitError` is also logged with its traceback."""
        if not isinstance(error, KitError):
            logger.exception("call %s failed", call)
        self._write({"id": call, "error": write_error(error)})

    def _write(self, message: Json) -> None:
        self._socket.setblocking(True)
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def _message(call: int, method: str, params: str) -> str:
    return f'{{"id": {call}, "method": "{method}", "params": {params}}}'


def write_error(error: Exception) -> Json:
    """Return an error as JSON; one that is not a `KitError` becomes a `TrainerError`."""
    if not isinstance(error, KitError):
        error = TrainerError(f"{type(error).__name__}: {error}")
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


def read_error(fields: Json) -> TrainerError:
    """Return the error that `write_error` wrote."""
    kind = getattr(errors, str(fields["type"]), TrainerError)
    if not (isinstance(kind, type) and issubclass(kind, TrainerError)):
        kind = TrainerError
    return kind(str(fields["message"]), hint=str(fields["hint"]))
