"""The vLLM engine: `vllm serve` as a child process, token ids in and out. vLLM is never imported.

It listens on a socket file that only this user can open: vLLM's own key guards only some of its
routes. Every step is a LoRA with a name and a path of its own, since vLLM's prefix cache would
serve stale values for one that was overwritten.
"""

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines import vllm_args
from trainer.engines.engine import Delta, SampleRequest
from trainer.engines.vllm_choice import VllmChoice
from trainer.engines.vllm_process import VllmProcess
from trainer.errors import BadRequest, Conflict, NotFound, TrainerError, WorkerDied
from trainer.processes.worker import gpu_environment

logger = logging.getLogger(__name__)
KEPT = 4  # LoRAs that stay loaded; older ones are loaded again when they are asked for


class VllmEngine:
    """Handle of a vLLM process; see `Engine` for what it does."""

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
        shared: bool = True,
    ) -> None:
        vllm_args.check(arguments, devices)
        self._model = model
        self._devices = devices if cuda else None
        self._shared = shared and cuda
        self._environment = {**vllm_args.environment(cuda=cuda), **gpu_environment(devices)}
        self._defaults = vllm_args.defaults(model, rank=rank, cuda=cuda, shared=shared)
        self._arguments = dict(arguments)
        self._tokenizer = Tokenizer(model)
        self._program = program
        self._process = VllmProcess(program, log=log)
        self._context = 0
        self._paths: dict[str, Path] = {}
        """Every LoRA that may be asked for."""
        self._loaded: dict[str, None] = {}
        """Those that vLLM holds, the one used longest ago first."""
        self._in_use = Counter[str]()
        self._generation = Counter[str]()
        """How often a name was given to other weights: vLLM's prefix cache knows only names."""
        self._forgotten: list[str] = []
        """What vLLM is to unload when it wakes."""
        self._changing = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._process.running

    async def start(self) -> None:
        try:
            await self._start()
        except WorkerDied as error:
            if not self._defaults.get("enable_sleep_mode"):
                raise
            logger.warning("vLLM is started without its sleep: %s", error.message)
            self._defaults["enable_sleep_mode"] = False
            await self._start()

    async def _start(self) -> None:
        await self._process.stop()
        self._process = VllmProcess(self._program, log=self._process.log)
        self._loaded.clear()
        self._forgotten.clear()
        arguments = self._in_effect
        await self._process.start(
            lambda socket: vllm_args.command_line(self._model, socket, arguments),
            {**self._environment, **vllm_args.sleeping(arguments)},
        )
        self._context = await self._process.context()

    async def stop(self) -> None:
        await self._process.stop()

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        """Take what a client asks for; a vLLM that runs without it is started again."""
        vllm_args.check(arguments, self._devices)
        for name, value in arguments.items():
            if self._arguments.get(name, value) != value:
                raise Conflict(
                    f"`engine_args.{name}` is `{self._arguments[name]}` here, not `{value}`",
                    hint="Ask for the same value, or start another server on other ports",
                )
        now = {**vllm_args.UNASKED, **self._in_effect}
        changed = [name for name, value in arguments.items() if now.get(name) != value]
        before, self._arguments = self._arguments, {**self._arguments, **arguments}
        if changed and self.running:
            logger.info("vLLM is started again for %s", ", ".join(f"`{n}`" for n in changed))
            async with self._changing:
                try:
                    await self.start()
                except TrainerError:
                    self._arguments = before  # with which it did start
                    await self.start()
                    raise

    async def make_room(self) -> bool:
        """Sleep until the next use: weights go to the host, the KV cache is dropped.

        A vLLM that was not started for it ends instead, and sleeps from the next time on: what
        sleeping needs is not paid for by those who have memory enough.
        """
        if not self._shared or self._in_effect.get("enable_sleep_mode") is False:
            return False
        async with self._changing:
            if self.running and self._in_effect.get("enable_sleep_mode"):
                try:
                    await self._process.sleep()
                    return True
                except TrainerError as error:
                    logger.warning("vLLM ends, since it does not fall asleep: %s", error.message)
            elif self.running:
                logger.warning("vLLM ends, for the learner needs its memory: later it will sleep")
            self._defaults["enable_sleep_mode"] = True
            await self._process.stop()
            self._process = VllmProcess(self._program, log=self._process.log)
        return True

    @property
    def _in_effect(self) -> Json:
        spread = vllm_args.spread(self._arguments, self._devices)
        return {**self._defaults, **spread, **self._arguments}

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

    @asynccontextmanager
    async def _using(self, lora: str | None) -> AsyncIterator[str]:
        """The name vLLM knows a LoRA by, which stays loaded meanwhile."""
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
                self._loaded[lora] = self._loaded.pop(lora)  # used last
            yield self._name(lora)
        finally:
            self._in_use[lora] -= 1

    async def _add(self, lora: str) -> None:
        if lora in self._loaded:
            return  # another request was first
        path = self._paths[lora]
        await self._make_room_for(path)
        body = {"lora_name": self._name(lora), "lora_path": str(path)}
        try:
            await self._process.post("/v1/load_lora_adapter", body)
        except BadRequest as error:
            if "already been loaded" not in error.message:  # by a call that was cancelled
                raise
        self._loaded[lora] = None
        idle = [name for name in self._loaded if not self._in_use[name]]
        for name in idle[: max(len(self._loaded) - KEPT, 0)]:
            await self._drop(name)

    async def _make_room_for(self, path: Path) -> None:
        """Start vLLM again when the LoRA's rank is over what it was started for."""
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        most = self._in_effect["max_lora_rank"]
        if config["r"] <= most:
            return
        if "max_lora_rank" in self._arguments:
            raise BadRequest(
                f"The LoRA has rank `{config['r']}`, over `engine_args.max_lora_rank` `{most}`",
                hint="Raise `max_lora_rank`, or leave it out",
            )
        logger.info("vLLM is started again for LoRAs of rank %s", config["r"])
        self._defaults["max_lora_rank"] = vllm_args.rank_for(config["r"])
        await self.start()

    async def _drop(self, lora: str) -> None:
        if lora in self._loaded and self.running:
            del self._loaded[lora]
            self._forgotten.append(self._name(lora))
            await self._unload_forgotten()

    async def _unload_forgotten(self) -> None:
        while self._forgotten and not self._process.asleep:
            name = self._forgotten.pop()
            await self._process.post("/v1/unload_lora_adapter", {"lora_name": name})

    def _name(self, lora: str) -> str:
        return f"{lora}.{self._generation[lora]}"

    # Sampling

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        await self._revive()
        # vLLM refuses several greedy choices, which would all be the same.
        copies = request.n if request.temperature == 0 else 1
        choices = [VllmChoice(i, self._tokenizer, request.stop) for i in range(request.n // copies)]
        async with (
            self._using(request.lora) as model,
            aclosing(self._rows(self._body(request, model, len(choices)))) as rows,
        ):
            async for row in rows:
                if delta := choices[row["index"]].take(row):
                    for copy in range(copies):
                        yield dataclasses.replace(delta, index=delta.index + copy)
                if row["finish_reason"] is None and all(choice.finished for choice in choices):
                    break  # at a stop string that vLLM has not seen

    def _body(self, request: SampleRequest, model: str, n: int) -> Json:
        prompt = request.prompt_ids
        room = self._context - len(prompt)
        if room <= 0 or (request.max_tokens or 0) > room:
            raise BadRequest(
                f"{len(prompt)} prompt tokens and `max_tokens` {request.max_tokens or 1} do not "
                f"fit the context of {self._context} tokens",
                hint="Shorten the messages, or lower `max_tokens`",
            )
        return {
            "model": model,
            "prompt": prompt,
            "n": n,
            "max_tokens": request.max_tokens or room,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": request.seed,
            "stop": list(request.stop),
            "stop_token_ids": sorted(self._tokenizer.eos_ids),
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "stream": request.stream,
        }

    async def _rows(self, body: Json) -> AsyncGenerator[Json]:
        """The choices of vLLM's answer, whole or piece by piece; leaving early cancels it."""
        if not body["stream"]:
            for choice in (await self._process.post("/v1/completions", body))["choices"]:
                yield choice
            return
        async with aclosing(self._process.stream("/v1/completions", body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    yield choice

    async def _revive(self) -> None:
        """Have a vLLM that is running and awake."""
        if self.running and not self._process.asleep:
            return
        async with self._changing:
            if self._process.asleep and self.running:
                try:
                    await self._process.wake()
                    return await self._unload_forgotten()
                except TrainerError as error:
                    logger.warning("vLLM is started again: %s", error.message)
                    return await self.start()
            if not self.running:
                if self._process.started:
                    logger.warning("%s", self._process.died().message)
                await self.start()
