"""The Ray actor on another machine: its engine and its learner processes, for the server.

The server's calls (`processes.rpc`) arrive one by one; the replies to all of them leave in one
stream, as many at once as there are, because each message through Ray costs about a millisecond.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.state_dir import LOGS
from kit.types import Json
from trainer.base_model.resolve import resolve
from trainer.config import ServerConfig
from trainer.engines.choose import create_engine, with_gpus_assigned
from trainer.engines.engine import Engine, SampleRequest
from trainer.errors import NotFound, TrainerError
from trainer.machines.lora_files import Hashes, LoraStore
from trainer.machines.peers import Peers
from trainer.processes.rpc import write_error

logger = logging.getLogger(__name__)


class MachineActor:
    """This machine's engine and learner processes, controlled by the server."""

    def __init__(self, directory: str) -> None:
        """`directory` holds LoRAs and logs; a relative one is below that of `ray start`."""
        self._directory = Path(directory).expanduser().resolve()
        (self._directory / LOGS).mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=self._directory / LOGS / "machine.log",
            level=logging.INFO,
            format="%(asctime)s %(name)s %(message)s",
        )
        self._store = LoraStore(self._directory / "loras")
        self._started_with: Json = {}
        self._engine: Engine | None = None
        self._loras: dict[str, Path] = {}
        self._peers = Peers(self._directory / LOGS / "learner.log")
        self._session = ""
        self._outbox: asyncio.Queue[Json | None] = asyncio.Queue()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._handlers: dict[str, Callable[..., Any]] = {
            "begin": self._begin,
            "configure": self._configure,
            "load": self._load,
            "unload": self._unload,
            "keep_only": self._keep_only,
        }

    create_engine = staticmethod(create_engine)

    # What the server calls through Ray

    async def replies(self, session: str) -> AsyncIterator[list[Json]]:
        """Serve this session from now on: yield its replies, until another session begins."""
        self._end_session()
        self._session, self._outbox = session, asyncio.Queue()
        outbox = self._outbox
        logger.info("a server has connected")
        yield []  # calls of this session are answered from here on
        while True:
            batch = [await outbox.get()]
            await asyncio.sleep(0)  # let others add theirs
            while not outbox.empty():
                batch.append(outbox.get_nowait())
            yield [reply for reply in batch if reply is not None]
            if None in batch:
                return

    async def receive(self, session: str, message: str) -> None:
        """Begin a call; its replies leave with those of the others."""
        if session != self._session:
            return  # of a server that was killed
        request = json.loads(message)
        call, method = int(request["id"]), str(request["method"])
        if method == "cancel":
            if task := self._calls.get(call):
                task.cancel()
            return
        self._calls[call] = asyncio.create_task(self._answer(call, method, request["params"]))
        self._calls[call].add_done_callback(partial(_forget, self._calls, call))

    async def store(self, session: str, content: Any) -> None:
        """Keep a file of a LoRA, for `load`."""
        if session == self._session:
            await asyncio.to_thread(self._store.receive, content)

    async def stop(self) -> None:
        """Stop everything that runs here."""
        self._end_session()
        await self._peers.stop()
        if self._engine:
            await self._engine.stop()
        self._engine = None

    def _end_session(self) -> None:
        self._outbox.put_nowait(None)
        self._session = ""
        for task in list(self._calls.values()):
            task.cancel()
        self._calls.clear()

    async def _answer(self, call: int, method: str, params: Json) -> None:
        outbox = self._outbox

        def reply(**fields: Any) -> None:
            outbox.put_nowait({"id": call, **fields})

        try:
            if method == "sample":
                async for row in self._sample(**params):
                    reply(row=row)
                reply(done=None)
            else:
                reply(done=await self._handlers[method](**params))
        except Exception as error:  # one bad request must not end the others
            if not isinstance(error, KitError):
                logger.exception("call %s failed", method)
            reply(error=write_error(error))

    # Calls of the server

    async def _begin(
        self,
        *,
        base_model: str,
        settings: Json,
        asked: Json,
        learner: Json | None,
    ) -> None:
        """Start the same engine as the head's, unless it is running already.

        `asked` holds the `engine_args` of clients. A machine without a place in the `learner`
        only samples.
        """
        directory = await asyncio.to_thread(resolve, base_model)
        config = ServerConfig(**settings, vllm=os.environ.get("ART_VLLM"))
        trains = learner is not None
        config = with_gpus_assigned(config, directory, {}, trains=trains)
        if learner is None:
            await self._peers.stop()
        else:
            await self._peers.join(base_model, config.learner_devices, **learner)
        parameters: Json = {"base_model": base_model, "settings": settings, "asked": asked}
        parameters |= {"devices": config.engine_devices, "trains": trains}
        if self._engine and self._started_with != parameters:
            await self._engine.stop()
            self._engine = None
        if self._engine is None:
            logs = self._directory / LOGS
            self._engine = self.create_engine(config, directory, logs, trains=trains)
            self._started_with, self._loras = parameters, {}
            await self._engine.configure(asked)
        if not self._engine.running:
            await self._engine.start()

    async def _configure(self, *, engine_args: Json) -> None:
        await self._running().configure(engine_args)
        self._started_with["asked"] = {**self._started_with["asked"], **engine_args}

    async def _load(self, *, lora: str, hashes: Hashes) -> Json:
        """Load a LoRA if all of its files are here; else return the missing ones."""
        missing = await asyncio.to_thread(self._store.complete, hashes)
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


def _forget(calls: dict[int, asyncio.Task[None]], call: int, task: asyncio.Task[None]) -> None:
    if calls.get(call) is task:  # another session may have begun, with the same numbers
        del calls[call]
