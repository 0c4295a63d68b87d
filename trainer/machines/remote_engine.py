"""The head's end of the connections that `trainer engine` opens from other machines.

A WebSocket carries calls (`processes.rpc`) as JSON messages and files as binary ones. Every
connection must present the key, even on loopback, because the head sends prompts over it.
"""

import asyncio
import contextlib
import dataclasses
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
from trainer.processes.rpc import RpcClient

logger = logging.getLogger(__name__)
MAX_BYTES = 64 << 20  # in one message; the longest holds a prompt, or the tokens of a reply
LOAD_WITHIN = 600.0  # seconds; a training step waits until every engine holds its LoRA


class RemoteEngine:
    """An engine on another machine. `read_replies` runs as long as it is connected."""

    def __init__(self, connection: ServerConnection) -> None:
        assert connection.request
        headers = connection.request.headers
        self.name = headers.get("X-Art-Node", "")[:64] or "unnamed"
        self.identity = headers.get("X-Art-Identity") or object()
        """Stays the same when the same machine connects again."""
        self._disconnected = asyncio.Event()
        self._connection = connection
        self._rpc = RpcClient(self._write, self.died)
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self._loading = asyncio.Lock()
        self._held: set[str] = set()

    async def read_replies(self) -> None:
        """Pass replies to the calls that wait for them, until the machine disconnects."""
        sending = asyncio.create_task(self._send())
        try:
            with contextlib.suppress(ConnectionClosed):
                async for message in self._connection:
                    self._rpc.receive(json.loads(message))
        except Exception as error:  # a bad message must not end the server
            logger.warning("the engine on `%s` sent an invalid message: %s", self.name, error)
        finally:
            self._disconnected.set()
            sending.cancel()
            self._rpc.fail_all()
            await self._connection.close()

    async def wait_until_disconnected(self) -> None:
        await self._disconnected.wait()

    async def close(self) -> None:
        await self._connection.close()

    async def call(self, method: str, **params: Any) -> Any:
        return await self._rpc.call(method, **params)

    async def release(self) -> None:
        """Tell the machine that the head is done, so that it exits."""
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(json.dumps({"id": 0, "method": "goodbye", "params": {}}))
        await self.close()

    async def load(self, lora: str, path: Path) -> None:
        """Load a LoRA, after sending the files that the machine lacks. It checks their hashes."""
        if lora in self._held:  # do not wait for the lock while another LoRA is being sent
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
            self._rpc.stream("sample", **dataclasses.asdict(request))  # type: ignore[type-var]
        ) as rows:
            async for row in rows:
                try:
                    delta = Delta.from_json(row)
                except TypeError:
                    raise self.died() from None  # it runs another version
                yield delta

    def _write(self, message: str) -> None:
        if self._disconnected.is_set():
            raise self.died()
        self._messages.put_nowait(message)

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self._connection.send(await self._messages.get())

    def died(self) -> WorkerDied:
        return WorkerDied(
            f"The engine on `{self.name}` was lost",
            hint="It reconnects automatically; see the output of `trainer engine` there",
        )


async def listen(
    host: str, port: int, key: str, on_join: Callable[[RemoteEngine], Awaitable[None]]
) -> Server:
    """Accept connections that present `key`, and call `on_join` with each one."""
    expected = f"Bearer {key}".encode()

    def check(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/health":
            return connection.respond(HTTPStatus.OK, "ok\n")
        credentials = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(credentials, expected):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "The key is not valid\n")
        return None

    async def handle(connection: ServerConnection) -> None:
        engine = RemoteEngine(connection)
        reading = asyncio.create_task(engine.read_replies())
        try:
            await on_join(engine)
            await reading
        except Exception as error:
            message = getattr(error, "message", None) or f"{type(error).__name__} {error}"
            logger.warning("the engine on `%s` cannot join: %s", engine.name, message)
        finally:
            await engine.close()
            await asyncio.gather(reading, return_exceptions=True)

    try:
        return await serve(
            handle,
            host,
            port,
            process_request=check,
            origins=[None],  # no page in a browser
            max_size=MAX_BYTES,
            compression=None,
        )
    except OSError as error:
        raise TrainerError(
            f"Cannot listen for engines on `{host}:{port}`: {error.strerror or error}",
            hint="Choose another `--nodes-host` or `--nodes-port`",
        ) from error
