"""The head's end of the connections that `trainer engine` on other machines opens to it.

A WebSocket carries calls (`processes.rpc`) as JSON, and files in pieces as binary messages. Every
connection must bring the key, on loopback too: who is let in gets the prompts.
"""

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import TrainerError, WorkerDied
from trainer.machines.lora_files import frames, hashes_of
from trainer.processes.rpc import Calls

logger = logging.getLogger(__name__)
MAX_BYTES = 64 << 20  # of one message; the longest is a prompt, or the tokens of an answer
LOAD_WITHIN = 600.0  # seconds; a training step waits for every engine to hold its LoRA


class Link:
    """An engine on another machine. `follow` reads its answers for as long as it is there."""

    def __init__(self, connection: ServerConnection) -> None:
        assert connection.request
        headers = connection.request.headers
        self.name = headers.get("X-Art-Node", "")[:64] or "unnamed"
        self.identity = headers.get("X-Art-Identity") or object()
        """The same when the same machine comes again."""
        self._gone = asyncio.Event()
        self._connection = connection
        self._calls = Calls(self._write, self.died)
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self._loading = asyncio.Lock()
        self._held: set[str] = set()

    async def follow(self) -> None:
        sending = asyncio.create_task(self._send())
        try:
            with contextlib.suppress(ConnectionClosed):
                async for message in self._connection:
                    self._calls.take(json.loads(message))
        except Exception as error:  # what another machine sends must not end the server
            logger.warning("the engine on `%s` is not understood: %s", self.name, error)
        finally:
            self._gone.set()
            sending.cancel()
            self._calls.end()
            await self._connection.close()

    async def gone(self) -> None:
        """Until the machine has left."""
        await self._gone.wait()

    async def close(self) -> None:
        await self._connection.close()

    async def call(self, method: str, **params: Any) -> Any:
        return await self._calls.call(method, **params)

    async def goodbye(self) -> None:
        """Tell the machine that nothing is to be done any more."""
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(json.dumps({"id": 0, "method": "goodbye", "params": {}}))
        await self.close()

    async def load(self, lora: str, path: Path) -> None:
        """Have the engine hold a LoRA, sending the files it lacks; they are hashed there."""
        if lora in self._held:  # asked with every request, also while another LoRA travels
            return
        async with self._loading, asyncio.timeout(LOAD_WITHIN):
            if lora in self._held:
                return
            hashes = await hashes_of(path)
            missing = (await self.call("load", lora=lora, hashes=hashes))["missing"]
            try:
                for name in missing:
                    for frame in frames(path / name, hashes[name]):
                        await self._connection.send(frame)
            except ConnectionClosed:
                raise self.died() from None
            if missing:
                await self.call("load", lora=lora, hashes=hashes)
            self._held.add(lora)

    async def unload(self, lora: str) -> None:
        self._held.discard(lora)
        await self.call("unload", lora=lora)

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        async with contextlib.aclosing(
            self._calls.stream("sample", **vars(request))  # type: ignore[type-var]
        ) as rows:
            async for row in rows:
                try:
                    delta = Delta(**row)
                except TypeError:
                    raise self.died() from None  # it speaks another language
                yield delta

    def _write(self, message: str) -> None:
        if self._gone.is_set():
            raise self.died()
        self._messages.put_nowait(message)

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self._connection.send(await self._messages.get())

    def died(self) -> WorkerDied:
        return WorkerDied(
            f"The engine on `{self.name}` was lost",
            hint="It joins again by itself; see the output of `trainer engine` there",
        )


async def listen(
    host: str, port: int, key: str, welcome: Callable[[Link], Awaitable[None]]
) -> Server:
    """Take connections that bring `key`; each is given to `welcome` and followed meanwhile."""
    expected = f"Bearer {key}".encode()

    def check(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/health":
            return connection.respond(HTTPStatus.OK, "ok\n")
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "The key is not valid\n")
        return None

    async def handle(connection: ServerConnection) -> None:
        link = Link(connection)
        following = asyncio.create_task(link.follow())
        try:
            await welcome(link)
            await following
        except Exception as error:
            told = getattr(error, "message", None) or f"{type(error).__name__} {error}"
            logger.warning("the engine on `%s` cannot join: %s", link.name, told)
        finally:
            await link.close()
            await asyncio.gather(following, return_exceptions=True)

    try:
        return await serve(
            handle, host, port, process_request=check, max_size=MAX_BYTES, compression=None
        )
    except OSError as error:
        raise TrainerError(
            f"Cannot take engines on `{host}:{port}`: {error.strerror or error}",
            hint="Choose another `--nodes-host` or `--nodes-port`",
        ) from error
