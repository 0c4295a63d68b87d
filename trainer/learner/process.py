"""The server's handle of the learner, a worker process that turns groups into checkpoints."""

import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config import LoraConfig, ServerConfig
from trainer.errors import TrainerError
from trainer.processes.worker import Worker, gpu_environment
from trainer.step_config import StepConfig

logger = logging.getLogger(__name__)
MODULE = "trainer.learner.torchrun"


class LearnerProcess:
    """Starts, stops and calls the learner: its single process, or torchrun's agent for several."""

    def __init__(
        self,
        base_model: str,
        *,
        log: Path,
        config: ServerConfig | None = None,
        master: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`master` is HOST:PORT where the processes of several machines meet."""
        config = config or ServerConfig()
        self._lora = config.lora.model_dump(mode="json")
        self._worker = Worker(
            "learner",
            MODULE,
            arguments(base_model, nodes=config.nodes, number=0, master=master)
            # Processes of other machines do not know this setting, so they send no logprobs.
            + (["--record", "all" if config.nodes == 1 else "own"] if config.keep_rollouts else [])
            + (["--quantization", config.quantization] if config.quantization else []),
            log=log,
            environment={**gpu_environment(config.learner_devices), **(environment or {})},
        )
        self.crowded = False
        """Whether a step did not fit beside the engine, which then sleeps during every step."""

    @property
    def running(self) -> bool:
        return self._worker.running

    async def start(self) -> None:
        await self._worker.start()

    async def warm_up(self) -> None:
        """Compile what the first step needs, with little of the GPU's memory."""
        await self._ahead("warm_up", "compile")

    async def load(self) -> None:
        """Load the base model, before the first run is prepared."""
        await self._ahead("load", "load the base model")

    async def _ahead(self, method: str, what: str) -> None:
        """Do what would otherwise be done at the first run, which is told if it fails again."""
        try:
            await self._worker.call(method, lora=self._lora)
        except TrainerError as error:
            logger.warning("the learner did not %s ahead: %s", what, error.message)

    async def stop(self) -> None:
        await self._worker.stop()

    async def prepare(self, checkpoints: Path, lora: LoraConfig) -> int:
        """Ensure that there is a checkpoint to start from, and return the newest good step."""
        await self._worker.revive()
        answer = await self._worker.call(
            "prepare", checkpoints=str(checkpoints), lora=lora.model_dump(mode="json")
        )
        return int(answer["step"])

    async def train(
        self,
        checkpoints: Path,
        request: Path,
        config: StepConfig,
        lora: LoraConfig,
        *,
        parent: int,
    ) -> AsyncIterator[dict[str, Any]]:
        """Train one step from `parent`. Yield a row per gradient step, then the checkpoint's.

        `request` is a JSON file with the step's `groups`. They may be large, and the server has
        other requests to answer than to send them.
        """
        await self._worker.revive()
        async for row in self._worker.stream(
            "train",
            checkpoints=str(checkpoints),
            request=str(request),
            config=config.model_dump(mode="json"),
            lora=lora.model_dump(mode="json"),
            parent=parent,
        ):
            yield row

    async def release(self) -> None:
        """Release memory reserved for the next step. A learner that died holds none."""
        try:
            await self._worker.call("release")
        except TrainerError as error:  # the step is valid all the same
            logger.warning("the learner did not release its memory: %s", error.message)

    async def score(
        self,
        checkpoints: Path,
        step: int,
        lora: LoraConfig,
        prompt_ids: list[int],
        completion_ids: list[int],
    ) -> list[float]:
        """Logprobs of a completion under the weights of a run's step."""
        await self._worker.revive()
        scores: list[float] = await self._worker.call(
            "score",
            checkpoints=str(checkpoints),
            step=step,
            lora=lora.model_dump(mode="json"),
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
        )
        return scores


def arguments(base_model: str, *, nodes: int, number: int, master: str) -> list[str]:
    """The arguments of the learner's process on machine `number` of `nodes`."""
    alone = ["--base-model", base_model]
    together = ["--nodes", str(nodes), "--number", str(number), "--master", master]
    return alone if nodes == 1 else alone + together
