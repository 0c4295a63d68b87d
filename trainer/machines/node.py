"""`trainer engine`: an engine on this machine that samples for the server on another.

It dials the head and answers its calls over that one connection; no port is opened here. Whatever
breaks, it dials again, until the head says goodbye or is not reached for too long. An engine that
died is started again before the head gives it more to do.
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
from trainer.engines.choose import create_engine, placed
from trainer.engines.engine import Engine, SampleRequest
from trainer.errors import NotFound, TrainerError
from trainer.machines.link import MAX_BYTES
from trainer.machines.lora_files import Hashes, LoraStore
from trainer.machines.peers import Peers
from trainer.processes.rpc import write_error

logger = logging.getLogger(__name__)
TELL_EVERY = 60.0  # seconds between two lines about a head that is not there


def run(config: NodeConfig) -> None:
    """Serve the head until it says goodbye."""
    if config.api_key is None:
        raise ConfigError("The head asks for a key", hint="Set `ART_API_KEY` to the server's")
    node = Node(config)
    asyncio.run(node.run(config.api_key.get_secret_value()))


class Node:
    """This machine's engine, and its part of the learner."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._name = socket.gethostname()
        self._directory = Path(config.node_dir).expanduser().resolve() / self._name
        self._store = LoraStore(self._directory / "loras")
        self._begun: Json = {}
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
        """Dial, serve, and dial again, for as long as there is a head."""
        headers = {
            "Authorization": f"Bearer {key}",
            "X-Art-Node": self._name,
            "X-Art-Identity": self._identity(),
        }
        url = self._config.head.replace("http", "ws", 1)
        reached, delay, told = time.monotonic(), 1.0, -TELL_EVERY
        try:
            while True:
                try:
                    # The head is in our own network: a proxy of the environment has no say.
                    async with connect(
                        url, additional_headers=headers, proxy=None,
                        compression=None, max_size=MAX_BYTES,
                    ) as connection:  # fmt: skip
                        began = time.monotonic()
                        if await self._serve(connection):
                            logger.info("the head at %s is done", url)
                            return
                    reached = time.monotonic()
                    delay = 1.0 if reached - began > 60 else min(delay * 2, 30.0)
                except (OSError, InvalidHandshake, TimeoutError) as error:
                    _raise_if_refused(error)
                    if time.monotonic() - told > TELL_EVERY:
                        told = time.monotonic()
                        logger.info("the head at %s is not there: %s", url, error)
                if time.monotonic() - reached > self._config.patience * 60:
                    raise TrainerError(
                        f"The head `{self._config.head}` was not reached for "
                        f"{self._config.patience:g} minutes",
                        hint="Check its address and that `trainer serve` runs there",
                    )
                await asyncio.sleep(delay)
        finally:
            await self._peers.stop()
            if self._engine:
                await self._engine.stop()

    async def _serve(self, connection: ClientConnection) -> bool:
        """Answer calls until the connection ends; whether the head said goodbye."""
        logger.info("joined the head at %s", self._config.head)
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            async for message in connection:
                if isinstance(message, bytes):
                    await asyncio.to_thread(self._store.receive, message)
                    continue
                told = json.loads(message)
                call, method = int(told["id"]), str(told["method"])
                if method == "goodbye":
                    return True
                if method == "cancel":
                    if task := calls.get(call):
                        task.cancel()
                    continue
                work = self._answer(connection, call, method, told["params"])
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
        async def tell(**answer: Any) -> None:
            await connection.send(json.dumps({"id": call, **answer}))

        with contextlib.suppress(WebSocketException):  # the head is gone, and so is its question
            try:
                if method == "sample":
                    async for row in self._sample(**params):
                        await tell(row=row)
                    await tell(done=None)
                else:
                    await tell(done=await self._handlers[method](**params))
            except WebSocketException:
                raise
            except Exception as error:  # one bad request must not end the others
                if not isinstance(error, KitError):
                    logger.exception("call %s failed", method)
                await tell(error=write_error(error))

    # What the head asks for

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
        """Start the engine that the head has too; one that runs already is kept."""
        directory = await asyncio.to_thread(resolve, base_model)
        part = None if learner is None or number is None else {**learner, "number": number}
        config = ServerConfig(
            engine=engine,
            engine_args=engine_args,
            engine_devices=self._config.engine_devices,
            learner_devices=self._config.learner_devices,
            vllm=self._config.vllm,
            lora=LoraConfig(rank=rank),
        )
        trains = part is not None
        # The learner has as many GPUs on every machine; one that only samples uses all it has.
        like_head = {"tensor_parallel_size": engine_cards} if trains and engine_cards else {}
        config = placed(config, directory, like_head, trains=trains)
        if part is None:
            await self._peers.stop()
        else:
            await self._peers.join(base_model, config.learner_devices, **part)
        same: Json = {"base_model": base_model, "engine": engine, "args": engine_args}
        same |= {"asked": asked, "devices": config.engine_devices, "trains": trains}
        if self._engine and self._begun != same:
            await self._engine.stop()
            self._engine = None
        if self._engine is None:
            logs = self._directory / LOGS
            self._engine = create_engine(config, directory, logs, trains=trains)
            self._begun, self._loras = same, {}
            await self._engine.configure(asked)
        if not self._engine.running:
            await self._engine.start()

    async def _configure(self, *, engine_args: Json) -> None:
        await self._running().configure(engine_args)
        self._begun["asked"] = {**self._begun["asked"], **engine_args}

    async def _load(self, *, lora: str, hashes: Hashes) -> Json:
        """Load a LoRA once all of its files are here and match; else say which are not."""
        missing = await asyncio.to_thread(self._store.complete, lora, hashes)
        if not missing:
            path = self._store.path(hashes)
            if self._loras.get(lora, path) != path:  # the run of that name was begun anew
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
        await asyncio.to_thread(self._store.keep_only, self._loras.values())

    async def _sample(self, **params: Any) -> AsyncIterator[Json]:
        request = SampleRequest(**{**params, "stop": tuple(params["stop"])})
        engine = self._running()
        if request.lora is not None:
            if request.lora not in self._loras:
                raise NotFound(f"The LoRA `{request.lora}` is not loaded")
            await engine.load(request.lora, self._loras[request.lora])  # again after a restart
        async with contextlib.aclosing(engine.sample(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield asdict(delta)

    def _running(self) -> Engine:
        if self._engine is None:
            raise TrainerError("The engine of this machine was not begun")
        return self._engine

    def _identity(self) -> str:
        """What tells this machine from others of its name, also after a restart."""
        path = self._directory / "identity"
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()


def _forget(calls: dict[int, asyncio.Task[None]], call: int, _: object) -> None:
    calls.pop(call, None)


def _raise_if_refused(error: Exception) -> None:
    if isinstance(error, InvalidStatus) and error.response.status_code == 401:
        raise ConfigError(
            "The head refused our key", hint="Set `ART_API_KEY` to the one of `trainer serve` there"
        ) from error
