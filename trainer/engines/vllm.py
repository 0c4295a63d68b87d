"""The vLLM engine: `vllm serve` as a child process, token ids in and out. vLLM is not imported.

It listens on a socket file that only this user can open, because vLLM's own key protects only some
of its routes. Every step's LoRA has a new name and path, because vLLM's prefix cache would serve
stale values for a LoRA that was overwritten.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.base_model.architecture import read_architecture
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines import constraints, vllm_args
from trainer.engines.checks import token_limit
from trainer.engines.engine import Delta, SampleRequest
from trainer.engines.vllm_parts import OtherParts
from trainer.engines.vllm_process import VllmProcess
from trainer.engines.vllm_sampling import VllmSampler, warm_up
from trainer.errors import BadRequest, Conflict, NotFound, TrainerError, WorkerDied

logger = logging.getLogger(__name__)
KEPT = 4  # LoRAs that stay loaded; older ones are loaded again when a request needs them


class VllmEngine:
    """An `Engine` that samples with a vLLM process."""

    name = "vllm"

    def __init__(
        self,
        model: Path,
        *,
        program: list[str],
        log: Path,
        rank: int,
        cuda: bool,
        arguments: Mapping[str, Any],
        devices: str | None = None,
        environment: Mapping[str, str] | None = None,
        reserved: asyncio.Event | None = None,
        shared: bool = True,
        nodes: int = 1,
    ) -> None:
        """`reserved` is set when vLLM has its GPU memory; `nodes` machines hold the model."""
        vllm_args.check(arguments, devices, nodes)
        self._model = model
        self._cuda = cuda
        self._devices = devices if cuda else None
        self._nodes = nodes
        self._parts: OtherParts | None = None
        self._shared = shared and cuda
        self._environment = {**vllm_args.environment(cuda=cuda), **(environment or {})}
        self._reserved = reserved or asyncio.Event()
        self._defaults = vllm_args.defaults(model, rank=rank, cuda=cuda, shared=shared)
        self._arguments = dict(arguments)
        self._tokenizer = Tokenizer(model)
        self._vocabulary = read_architecture(model).vocab_size
        self._program = program
        self._process = VllmProcess(program, log=log)
        self._context = 0
        self._paths: dict[str, Path] = {}
        """Every LoRA that a request may name."""
        self._loaded: dict[str, None] = {}
        """LoRAs that vLLM has loaded, least recently used first."""
        self._in_use = Counter[str]()
        self._generation = Counter[str]()
        """How many times each name got new weights: vLLM's prefix cache tells LoRAs by name."""
        self._to_unload: list[str] = []
        """vLLM's names of LoRAs to unload when it wakes up."""
        self._changing = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._process.running

    def divide(self, parts: OtherParts) -> None:
        """Hold the model together with other machines."""
        self._parts = parts

    async def start(self) -> None:
        """Start vLLM, unless another caller has started it in the meantime."""
        async with self._changing:
            if not self.running:
                await self._restart()

    async def _restart(self) -> None:
        """Stop vLLM if it runs, and start it. Callers hold `_changing`: never two vLLMs at once."""
        try:
            await self._start()
        except WorkerDied as error:
            if not self._process.died_in_our_kernels:
                if not self._defaults.get("enable_sleep_mode"):
                    raise
                logger.warning("vLLM did not start, trying without sleep mode: %s", error.message)
                self._defaults["enable_sleep_mode"] = False
            await self._restart()

    async def _start(self) -> None:
        await self._process.stop()
        if self._process.died_in_our_kernels:
            self._defaults[vllm_args.EXTENSION] = vllm_args.WITHOUT_KERNELS
            logger.warning("vLLM starts without our kernels, because it may have died in them")
        self._process = VllmProcess(self._program, log=self._process.log)
        self._loaded.clear()
        self._to_unload.clear()
        arguments = self._effective_arguments
        environment = {**self._environment, **vllm_args.sleep_environment(arguments)}
        if self._parts:
            arguments |= await self._parts.start(arguments, self._process.stop)
            environment |= self._parts.environment
        try:
            await self._process.start(
                lambda socket: vllm_args.command_line(self._model, socket, arguments),
                environment,
                self._reserved,
            )
        except WorkerDied:
            if self._parts and self._parts.failure:
                raise self._parts.failure from None
            raise
        self._context = await self._process.context()

    async def stop(self) -> None:
        await self._process.stop()
        if self._parts:
            await self._parts.leave()

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        """Add a client's arguments, and restart vLLM if it runs with other values."""
        for name, value in arguments.items():
            if self._arguments.get(name, value) != value:
                raise Conflict(
                    f"`engine_args.{name}` is `{self._arguments[name]}` here, not `{value}`",
                    hint="Use the same value, or start another server on other ports",
                )
        vllm_args.check({**self._arguments, **arguments}, self._devices, self._nodes)
        current = {**vllm_args.VLLM_DEFAULTS, **self._effective_arguments}
        changed = [name for name, value in arguments.items() if current.get(name) != value]
        before, self._arguments = self._arguments, {**self._arguments, **arguments}
        if changed and self.running:
            logger.info("restarting vLLM to change %s", ", ".join(f"`{n}`" for n in changed))
            async with self._changing:
                try:
                    await self._restart()
                except TrainerError:
                    self._arguments = before  # vLLM did start with these
                    await self._restart()
                    raise

    async def make_room(self) -> bool:
        """Sleep until the next request: move the weights to the host and drop the KV cache.

        Sleep mode is not free, so vLLM starts without it. The first time, vLLM stops instead; it
        starts again with sleep mode, and sleeps from then on.
        """
        if not self._shared or self._effective_arguments.get("enable_sleep_mode") is False:
            return False
        async with self._changing:
            if self.running and self._effective_arguments.get("enable_sleep_mode"):
                try:
                    await self._process.sleep()
                    return True
                except TrainerError as error:
                    logger.warning("stopping vLLM, because it cannot sleep: %s", error.message)
            elif self.running:
                logger.warning("stopping vLLM, because the learner needs its memory")
            self._defaults["enable_sleep_mode"] = True
            await self._process.stop()
            if self._parts:
                await self._parts.stop()
            self._process = VllmProcess(self._program, log=self._process.log)
        return True

    @property
    def _effective_arguments(self) -> Json:
        spread = vllm_args.spread(self._arguments, self._devices, self._nodes)
        arguments = {**self._defaults, **spread, **self._arguments}
        return {**arguments, **vllm_args.graphs(arguments)}

    # LoRAs

    async def load(self, lora: str, path: Path) -> None:
        if self._paths.get(lora) != path:
            self._generation[lora] += 1
            self._paths[lora] = path
        await self._revive()
        async with self._using(lora):
            pass

    async def unload(self, lora: str) -> None:
        async with self._changing:
            await self._drop(lora)
            self._paths.pop(lora, None)
            if self._parts:
                await self._parts.unshare(lora)

    @asynccontextmanager
    async def _using(self, lora: str | None) -> AsyncIterator[str]:
        """Keep a LoRA loaded inside the context, and return vLLM's name for it."""
        if lora is None:
            yield vllm_args.BASE
            return
        if lora not in self._paths:
            raise NotFound(f"The LoRA `{lora}` is not loaded")
        self._in_use[lora] += 1
        try:
            if lora not in self._loaded:
                async with self._changing:
                    await self._add(lora)
            if lora in self._loaded:
                self._loaded[lora] = self._loaded.pop(lora)  # now the most recently used
            yield self._name(lora)
        finally:
            self._in_use[lora] -= 1

    async def _add(self, lora: str) -> None:
        if lora in self._loaded:
            return  # another request loaded it first
        path = self._paths[lora]
        await self._raise_max_rank(path)
        if self._parts:
            path = await self._parts.share(lora, path)
        body = {"lora_name": self._name(lora), "lora_path": str(path)}
        try:
            await self._process.post("/v1/load_lora_adapter", body)
        except BadRequest as error:
            if "already been loaded" not in error.message:  # by a request that was cancelled
                raise
        if self._cuda and not self._loaded and not self._process.asleep:
            await warm_up(self._process, model=self._name(lora), context=self._context)
        self._loaded[lora] = None
        idle = [name for name in self._loaded if not self._in_use[name]]
        for name in idle[: max(len(self._loaded) - KEPT, 0)]:
            await self._drop(name)

    async def _raise_max_rank(self, path: Path) -> None:
        """Restart vLLM if the LoRA's rank exceeds the maximum that vLLM was started with."""
        rank, most = vllm_args.rank_of(path), self._effective_arguments["max_lora_rank"]
        if rank <= most:
            return
        if "max_lora_rank" in self._arguments:
            raise BadRequest(
                f"The LoRA has rank `{rank}`, above `engine_args.max_lora_rank` `{most}`",
                hint="Raise `max_lora_rank`, or remove it",
            )
        logger.info("restarting vLLM for LoRAs of rank %s", rank)
        self._defaults["max_lora_rank"] = vllm_args.rank_for(rank)
        await self._restart()

    async def _drop(self, lora: str) -> None:
        if lora in self._loaded and self.running:
            del self._loaded[lora]
            self._to_unload.append(self._name(lora))
            await self._unload_dropped()

    async def _unload_dropped(self) -> None:
        while self._to_unload and not self._process.asleep:
            name = self._to_unload.pop()
            await self._process.post("/v1/unload_lora_adapter", {"lora_name": name})

    def _name(self, lora: str) -> str:
        return f"{lora}.{self._generation[lora]}"

    # Sampling

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        await self._revive()
        limit = token_limit(request, context=self._context, vocabulary=self._vocabulary)
        if request.constraint:
            await asyncio.to_thread(constraints.check, request.constraint)
        async with self._using(request.lora) as model:
            sampler = VllmSampler(
                self._process, self._tokenizer, model=model, context=self._context
            )
            async with aclosing(sampler.sample(request, limit)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _revive(self) -> None:
        """Make sure that vLLM is running and awake."""
        if self.running and not self._process.asleep:
            return
        async with self._changing:
            if self._process.asleep and self.running:
                try:
                    await self._process.wake()
                    return await self._unload_dropped()
                except TrainerError as error:
                    logger.warning("restarting vLLM, because it cannot wake up: %s", error.message)
                    return await self._restart()
            if not self.running:
                if self._process.started:
                    logger.warning("%s", self._process.died().message)
                await self._restart()
