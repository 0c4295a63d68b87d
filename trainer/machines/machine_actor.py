"""The Ray actor on another machine: its engine and its learner processes, for the server.

Ray starts and restarts the actor and brings it LoRAs. Calls and tokens (`processes.rpc`) take one
connection of their own, since each message through Ray costs a millisecond of a core: the actor
tells the server its port and a secret through Ray, and answers who knows the secret.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
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
from trainer.engines import vllm_args
from trainer.engines.choose import create_engine, vllm_program, with_gpus_assigned
from trainer.engines.engine import Engine, SampleRequest
from trainer.engines.gpus import has_cuda
from trainer.engines.vllm_process import VllmProcess
from trainer.errors import NotFound, TrainerError
from trainer.machines.lora_files import Hashes, LoraStore
from trainer.machines.peers import Peers
from trainer.machines.remote_engine import LIMIT
from trainer.processes.rpc import write_error
from trainer.processes.worker import gpu_environment

logger = logging.getLogger(__name__)
GREETED_WITHIN = 30.0  # seconds
GREETING = 65  # bytes of the first line: the secret


class MachineActor:
    """This machine's engine and learner processes, controlled by the server."""

    def __init__(self, directory: str, address: str) -> None:
        """`directory` holds LoRAs and logs; a relative one is below that of `ray start`.

        `address` is this machine's in the cluster.
        """
        self._address = address
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
        self._working = asyncio.Lock()
        self._loras: dict[str, Path] = {}
        self._peers = Peers(self._directory / LOGS / "learner.log")
        self._listening: asyncio.Server | None = None
        self._secret = ""
        self._connection: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._handlers: dict[str, Callable[..., Any]] = {
            "join_learner": self._join_learner,
            "begin": self._begin,
            "work": self._work,
            "configure": self._configure,
            "load": self._load,
            "unload": self._unload,
            "keep_only": self._keep_only,
        }

    create_engine = staticmethod(create_engine)

    # What the server calls through Ray

    async def open(self) -> tuple[int, str]:
        """Begin to listen, and return the port and the secret for the next connection."""
        if self._listening is None:
            self._listening = await asyncio.start_server(self._serve, self._address, limit=LIMIT)
        self._secret = secrets.token_hex(GREETING // 2)
        return int(self._listening.sockets[0].getsockname()[1]), self._secret

    async def store(self, content: Any) -> None:
        """Keep a file of a LoRA, for `load`."""
        await asyncio.to_thread(self._store.receive, content)

    async def stop(self) -> None:
        """Stop everything that runs here."""
        self._end_session()
        if self._listening:
            self._listening.close()
        self._listening = None
        await self._peers.stop()
        await self._stop_engine()
        self._store.unlink()

    # The connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the calls of one connection; the newest one replaces the others."""
        try:
            async with asyncio.timeout(GREETED_WITHIN):
                greeting = await reader.readexactly(GREETING)  # no more, from somebody unknown
            expected = f"{self._secret}\n".encode()
            if not self._secret or not hmac.compare_digest(greeting, expected):
                logger.warning("a connection without the secret was refused")
                return
            self._secret = ""  # it is good for one connection
            self._end_session()
            self._connection = writer
            logger.info("the server has connected")
            while line := await reader.readline():
                self._receive(json.loads(line))
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            logger.info("a connection broke: %s", error)
        finally:
            if self._connection is writer:
                self._end_session()
            writer.close()

    def _receive(self, request: Json) -> None:
        """Begin a call, or cancel one."""
        call, method = int(request["id"]), str(request["method"])
        if method == "cancel":
            if task := self._calls.get(call):
                task.cancel()
            return
        self._calls[call] = asyncio.create_task(self._answer(call, method, request["params"]))
        self._calls[call].add_done_callback(partial(_forget, self._calls, call))

    def _end_session(self) -> None:
        for task in list(self._calls.values()):
            task.cancel()
        self._calls.clear()
        if self._connection:
            self._connection.close()
        self._connection = None

    async def _answer(self, call: int, method: str, params: Json) -> None:
        connection = self._connection
        assert connection

        async def reply(**fields: Any) -> None:
            connection.write(json.dumps({"id": call, **fields}).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the server is gone: nobody waits for it
                await connection.drain()

        try:
            if method == "sample":
                async for row in self._sample(**params):
                    await reply(row=row)
                await reply(done=None)
            else:
                await reply(done=await self._handlers[method](**params))
        except Exception as error:  # one bad request must not end the others
            if not isinstance(error, KitError):
                logger.exception("call %s failed", method)
            await reply(error=write_error(error))

    # Calls of the server

    async def _join_learner(self, **settings: Any) -> None:
        await self._prepare(**settings, arguments={})

    async def _prepare(
        self, *, base_model: str, settings: Json, learner: Json | None, arguments: Json
    ) -> tuple[ServerConfig, Path]:
        """Start this machine's learner processes, and return its GPUs and its base model.

        A machine without a place in the `learner` only samples. `arguments` are vLLM's.
        """
        directory = await asyncio.to_thread(resolve, base_model)
        config = ServerConfig(**settings, vllm=os.environ.get("ART_VLLM"))
        trains = learner is not None
        config = with_gpus_assigned(config, directory, arguments, trains=trains)
        if learner is None:
            await self._peers.stop()
        else:
            await self._peers.join(base_model, config.learner_devices, **learner)
        return config, directory

    async def _begin(
        self, *, base_model: str, settings: Json, asked: Json, learner: Json | None
    ) -> None:
        """Start the same engine as the head's, unless it is running already.

        `asked` holds the `engine_args` of clients.
        """
        trains = learner is not None
        config, directory = await self._prepare(
            base_model=base_model, settings=settings, learner=learner, arguments={}
        )
        parameters: Json = {"base_model": base_model, "settings": settings, "asked": asked}
        parameters |= {"devices": config.engine_devices, "trains": trains}
        if self._started_with != parameters:
            await self._stop_engine()
        if self._engine is None:
            logs = self._directory / LOGS
            self._engine = self.create_engine(config, directory, logs, trains=trains)
            self._started_with, self._loras = parameters, {}
            await self._engine.configure(asked)
        if not self._engine.running:
            await self._engine.start()

    async def _work(self, *, arguments: Json, **settings: Any) -> None:
        """Run a part of the head's vLLM until it dies, or the head cancels or loses this call."""
        config, directory = await self._prepare(**settings, arguments=arguments)
        await self._stop_engine()  # of a server that did not divide its model
        process = VllmProcess(vllm_program(config.vllm), log=self._directory / LOGS / "engine.log")
        environment = {
            **vllm_args.environment(cuda=has_cuda()),
            **vllm_args.sleep_environment(arguments),
            **gpu_environment(config.engine_devices),
            "VLLM_HOST_IP": self._address,
        }
        async with self._working:  # the part before it may still be ending
            await process.work(vllm_args.command_line(directory, None, arguments), environment)

    async def _stop_engine(self) -> None:
        if self._engine:
            await self._engine.stop()
        self._engine = None

    async def _configure(self, *, engine_args: Json) -> None:
        await self._running().configure(engine_args)
        self._started_with["asked"] = {**self._started_with["asked"], **engine_args}

    async def _load(self, *, lora: str, hashes: Hashes, link: str | None = None) -> Json:
        """Load a LoRA if all of its files are here; else return the missing ones.

        With `link` vLLM's part here finds it there, when the head's loads it.
        """
        missing = await asyncio.to_thread(self._store.complete, hashes)
        if not missing:
            path = self._store.path(hashes)
            if self._loras.get(lora, path) != path:  # a new run has the name of an old one
                await self._unload(lora=lora)
            if link is None:
                await self._running().load(lora, path)
            else:
                await asyncio.to_thread(self._store.link, path, Path(link))
            self._loras[lora] = path
        return {"missing": missing}

    async def _unload(self, *, lora: str) -> None:
        path = self._loras.pop(lora, None)
        if self._engine:
            await self._engine.unload(lora)
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
    if calls.get(call) is task:  # another connection may have begun, with the same numbers
        del calls[call]
