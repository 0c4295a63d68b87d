"""`trainer engine`: run an engine on this machine for the server on another, the head.

It connects to the head and answers the head's calls over that one connection; it opens no port.
When the connection breaks it connects again, until the head says goodbye or stays unreachable for
too long. An engine that died is restarted before the head sends it more requests.
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException

from kit.errors import ConfigError, KitError
from kit.state_dir import LOGS
from kit.types import Json
from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig, NodeConfig, ServerConfig
from trainer.engines.choose import create_engine, with_gpus_assigned
from trainer.engines.engine import Engine, SampleRequest
from trainer.errors import NotFound, TrainerError
from trainer.machines.lora_files import Hashes, LoraStore
from trainer.machines.peers import Peers
from trainer.machines.remote_engine import MAX_BYTES
from trainer.processes.rpc import write_error

logger = logging.getLogger(__name__)
LOG_INTERVAL = 60.0  # seconds between two log lines about an unreachable head


def run(config: NodeConfig) -> None:
    """Serve the head until it says goodbye."""
    if config.api_key is None:
        raise ConfigError("The head requires a key", hint="Set `ART_API_KEY` to the server's key")
    node = Node(config)
    asyncio.run(node.run(config.api_key.get_secret_value()))


class Node:
    """This machine's engine and learner processes, controlled by the head."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._name = socket.gethostname()
        self._directory = Path(config.node_dir).expanduser().resolve() / self._name
        self._store = LoraStore(self._directory / "loras")
        self._started_with: Json = {}
        self._engine: Engine | None = None
        self._loras: dict[str, Path] = {}
        self._peers = Peers(self._directory / LOGS / "learner.log")
        self._handlers: dict[str, Callable[..., Any]] = {
            "begin": self._begin,
            "configure": self._configure,
            "load": self._load,
            "unload": self._unload,
            "keep_only": self._keep_only,
        }

    async def run(self, key: str) -> None:
        """Connect to the head and serve it; reconnect until it is done or unreachable."""
        headers = {
            "Authorization": f"Bearer {key}",
            "X-Art-Node": self._name,
            "X-Art-Identity": self._identity(),
        }
        url = self._config.head.replace("http", "ws", 1)
        reached, delay, logged = time.monotonic(), 1.0, -LOG_INTERVAL
        try:
            while True:
                try:
                    # The head is on the same network: ignore the environment's proxy settings.
                    async with connect(
                        url, additional_headers=headers, proxy=None,
                        compression=None, max_size=MAX_BYTES,
                    ) as connection:  # fmt: skip
                        connected = time.monotonic()
                        if await self._serve(connection):
                            logger.info("the head at %s is shutting down; exiting", url)
                            return
                    reached = time.monotonic()
                    delay = 1.0 if reached - connected > 60 else min(delay * 2, 30.0)
                except (OSError, InvalidHandshake, TimeoutError) as error:
                    _raise_if_refused(error)
                    if time.monotonic() - logged > LOG_INTERVAL:
                        logged = time.monotonic()
                        logger.info("the head at %s is not reachable: %s", url, error)
                if time.monotonic() - reached > self._config.patience * 60:
                    raise TrainerError(
                        f"The head `{self._config.head}` was unreachable for "
                        f"{self._config.patience:g} minutes",
                        hint="Check its address, and that `trainer serve` runs there",
                    )
                await asyncio.sleep(delay)
        finally:
            await self._peers.stop()
            if self._engine:
                await self._engine.stop()

    async def _serve(self, connection: ClientConnection) -> bool:
        """Answer calls until the connection ends, and return whether the head said goodbye."""
        logger.info("joined the head at %s", self._config.head)
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            async for message in connection:
                if isinstance(message, bytes):
                    await asyncio.to_thread(self._store.receive, message)
                    continue
                request = json.loads(message)
                call, method = int(request["id"]), str(request["method"])
                if method == "goodbye":
                    return True
                if method == "cancel":
                    if task := calls.get(call):
                        task.cancel()
                    continue
                work = self._answer(connection, call, method, request["params"])
                calls[call] = asyncio.create_task(work)
                calls[call].add_done_callback(partial(_forget, calls, call))
        except WebSocketException as error:
            logger.info("the connection to the head broke: %s", error)
        finally:
            for task in list(calls.values()):
                task.cancel()
        return False

    async def _answer(
        self, connection: ClientConnection, call: int, method: str, params: Json
    ) -> None:
        async def reply(**fields: Any) -> None:
            await connection.send(json.dumps({"id": call, **fields}))

        with contextlib.suppress(WebSocketException):  # the head is gone: nobody waits for it
            try:
                if method == "sample":
                    async for row in self._sample(**params):
                        await reply(row=row)
                    await reply(done=None)
                else:
                    await reply(done=await self._handlers[method](**params))
            except WebSocketException:
                raise
            except Exception as error:  # one bad request must not end the others
                if not isinstance(error, KitError):
                    logger.exception("call %s failed", method)
                await reply(error=write_error(error))

    # Calls of the head

    async def _begin(
        self,
        *,
        base_model: str,
        engine: str,
        engine_args: Json,
        rank: int,
        learner: Json | None,
        engine_cards: int | None,
        asked: Json,
        number: int | None,
    ) -> None:
        """Start the same engine as the head's, unless it is running already.

        `asked` holds the `engine_args` of clients. A machine without a `number` only samples.
        """
        directory = await asyncio.to_thread(resolve, base_model)
        world = None if learner is None or number is None else {**learner, "number": number}
        config = ServerConfig(
            engine=engine,
            engine_args=engine_args,
            engine_devices=self._config.engine_devices,
            learner_devices=self._config.learner_devices,
            vllm=self._config.vllm,
            lora=LoraConfig(rank=rank),
        )
        trains = world is not None
        # The learner has the same number of GPUs on every machine. A machine that only samples
        # uses all of its GPUs for that.
        like_head = {"tensor_parallel_size": engine_cards} if trains and engine_cards else {}
        config = with_gpus_assigned(config, directory, like_head, trains=trains)
        if world is None:
            await self._peers.stop()
        else:
            await self._peers.join(base_model, config.learner_devices, **world)
        parameters: Json = {"base_model": base_model, "engine": engine, "args": engine_args}
        parameters |= {"asked": asked, "devices": config.engine_devices, "trains": trains}
        if self._engine and self._started_with != parameters:
            await self._engine.stop()
            self._engine = None
        if self._engine is None:
            logs = self._directory / LOGS
            self._engine = create_engine(config, directory, logs, trains=trains)
            self._started_with, self._loras = parameters, {}
            await self._engine.configure(asked)
        if not self._engine.running:
            await self._engine.start()

    async def _configure(self, *, engine_args: Json) -> None:
        await self._running().configure(engine_args)
        self._started_with["asked"] = {**self._started_with["asked"], **engine_args}

    async def _load(self, *, lora: str, hashes: Hashes) -> Json:
        """Load a LoRA if all of its files are here and match; else return the missing ones."""
        missing = await asyncio.to_thread(self._store.complete, lora, hashes)
        if not missing:
            path = self._store.path(hashes)
            if self._loras.get(lora, path) != path:  # a new run has the name of an old one
                await self._unload(lora=lora)
            await self._running().load(lora, path)
            self._loras[lora] = path
        return {"missing": missing}

    async def _unload(self, *, lora: str) -> None:
        path = self._loras.pop(lora, None)
        await self._running().unload(lora)
        if path and path not in self._loras.values():
            await asyncio.to_thread(self._store.delete, path)

    async def _keep_only(self, *, loras: list[str]) -> None:
        for lora in set(self._loras) - set(loras):
            await self._unload(lora=lora)
        await asyncio.to_thread(self._store.keep_only, list(self._loras.values()))

    async def _sample(self, **params: Any) -> AsyncIterator[Json]:
        request = SampleRequest.from_json(params)
        engine = self._running()
        if request.lora is not None:
            if request.lora not in self._loras:
                raise NotFound(f"The LoRA `{request.lora}` is not loaded")
            await engine.load(request.lora, self._loras[request.lora])  # it may have restarted
        async with contextlib.aclosing(engine.sample(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield asdict(delta)

    def _running(self) -> Engine:
        if self._engine is None:
            raise TrainerError("The engine of this machine has not been started")
        return self._engine

    def _identity(self) -> str:
        """Return an id that survives restarts and differs between machines of the same name."""
        path = self._directory / "identity"
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()


def _forget(calls: dict[int, asyncio.Task[None]], call: int, _: object) -> None:
    calls.pop(call, None)


def _raise_if_refused(error: Exception) -> None:
    if isinstance(error, InvalidStatus) and error.response.status_code == 401:
        raise ConfigError(
            "The head rejected the key", hint="Set `ART_API_KEY` to the key of `trainer serve`"
        ) from error
