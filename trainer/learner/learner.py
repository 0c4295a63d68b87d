"""Runs one train call: turns groups into gradient steps and a new checkpoint.

It reads the last good checkpoint, prepares and packs the groups, takes the gradient steps and
writes the next checkpoint.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, faults
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.errors import OutOfMemory
from trainer.learner.clock import Clock
from trainer.learner.gradient import GradientSteps, borrowed_lora, completion_logprobs
from trainer.learner.pack import Row, pack
from trainer.learner.plot import NAME as PICTURE
from trainer.learner.plot import plot_rows
from trainer.learner.prepare import Group
from trainer.learner.ready import Ready, batches_of, get_ready, limit_of
from trainer.learner.record import Record, Recording
from trainer.learner.sft import SUPERVISED, prepare_sft
from trainer.learner.state import (
    State,
    check_belongs,
    check_reference,
    load_policy,
    lora_shape,
    weights_hash,
)
from trainer.learner.world import World
from trainer.policy.model import Policy
from trainer.step_config import GrpoConfig, SftConfig, StepConfig

logger = logging.getLogger(__name__)


class Learner:
    """Trains one base model. Holds one run in memory at a time, and reads others from disk."""

    def __init__(
        self,
        base_model: str,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        world: World | None = None,
        fp8: bool = False,
        record: Record = "nothing",
    ) -> None:
        self.world = world or World()
        self.record = record
        self.fp8 = fp8
        self.base_model = base_model
        self.directory = directory
        self.dtype = dtype
        self.device = device
        self.tokenizer = Tokenizer(directory)
        self.before_row: Callable[[], None] = lambda: None
        """Called before each row of a step is computed."""
        self.state: State | None = None
        self._clock = Clock()
        self.loaded: tuple[Path, int, str] | None = None  # the run and step in `state`

    def load(self, lora: LoraConfig | None) -> None:
        """Load the base model for a run with this LoRA, before there is one."""
        self._state(lora)

    def prepare(self, checkpoints: Path, lora: LoraConfig | None) -> int:
        """Return the run's latest good step. A new run gets checkpoint 0 with a fresh LoRA."""
        step = self.world.on_first(lambda: self._latest(checkpoints))
        if step is None:
            step, state = 0, self._state(lora, fresh=True)
            self._save(state, checkpoints, step, lora, parent=None, config=None)
        else:
            path = checkpoint.path_of(checkpoints, step)
            self.world.on_first(lambda: check_belongs(path, base_model=self.base_model, lora=lora))
        return step

    def train(
        self,
        checkpoints: Path,
        groups: Sequence[Group] | Ready,
        config: StepConfig,
        lora: LoraConfig | None,
        *,
        parent: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each gradient step from `parent`, then the new checkpoint."""
        self._clock = Clock()
        try:
            step = self._load(checkpoints, lora, parent)
            faults.reached("learner-begins")
            if isinstance(config, SftConfig):
                assert not isinstance(groups, Ready)
                yield from self._train_sft(checkpoints, step, groups, config, lora)
            else:
                yield from self._train(checkpoints, step, groups, config, lora)
        except BaseException as error:
            # Weights may be partly updated: the next call starts from the last good checkpoint.
            self.loaded = None
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            if self.state and self.state.policy.compiled:
                self.state.policy.compiled.plan_with_less_memory()
            raise OutOfMemory(f"The step does not fit the GPU: {error}") from error

    @torch.no_grad()
    def score(
        self,
        checkpoints: Path,
        step: int,
        lora: LoraConfig,
        prompt_ids: list[int],
        completion_ids: list[int],
    ) -> list[float]:
        """Logprobs of a completion under the weights of a run's step."""
        if not (self.loaded and self.state and self.state.policy.lora == lora):
            self._load(checkpoints, lora)
        assert self.state is not None
        path = checkpoint.path_of(checkpoints, step)
        loaded = self.loaded == self._identity(checkpoints, step)
        policy = self.state.policy
        with nullcontext() if loaded else borrowed_lora(policy, path, self.world):
            return completion_logprobs(policy, prompt_ids, completion_ids, compiled=self.fp8)

    def ready(self, groups: Sequence[Group], config: GrpoConfig, step: int) -> Ready:
        """Prepare a request for the step after `step`. A thread may do so while a step trains."""
        assert self.state is not None
        given = (self.tokenizer, self.state.policy, groups, config, step)
        return get_ready(*given, full=self.device.type == "cuda")

    def _train(
        self,
        checkpoints: Path,
        step: int,
        groups: Sequence[Group] | Ready,
        config: GrpoConfig,
        lora: LoraConfig | None,
    ) -> Iterator[dict[str, Any]]:
        assert self.state is not None
        state = self.state
        check = partial(check_reference, config, checkpoints, base_model=self.base_model, lora=lora)
        self.world.on_first(check)
        if not isinstance(groups, Ready):
            groups = self.ready(groups, config, step)
        elif (groups.config, groups.step) != (config, step):
            groups = self.ready(groups.groups, config, step)
        batches, prepared = batches_of(groups, state, self.device, self.world.size), groups.prepared
        prepared.metrics |= {
            "data/step_num_gradient_steps": float(len(batches)),
            "num_gradient_steps": float(len(batches)),
        }
        if not batches:
            reasons = sorted({drop["reason"] for drop in prepared.dropped})
            logger.warning(
                "step %s trains on nothing: %s", step + 1, ", ".join(reasons) or "no group"
            )
            yield prepared.metrics
        self._clock.lap("time/prepare_s")
        recording = Recording(self.record, checkpoints, step + 1, self.world)
        steps = self._steps(config, step, recording, prepared.reward_std_dev)
        for metrics in steps.run(batches):
            yield {**prepared.metrics, **metrics}
            faults.reached("learner-stepped")
        self._clock.lap("time/gradient_s")
        recording.write(prepared)
        rows = [row for batch in batches for row in batch] if config.plot_tensors else []
        path = self._save(state, checkpoints, step + 1, lora, parent=step, config=config, rows=rows)
        yield self._result(path, step + 1, prepared.dropped)

    def _train_sft(
        self,
        checkpoints: Path,
        step: int,
        groups: Sequence[Group],
        config: SftConfig,
        lora: LoraConfig | None,
    ) -> Iterator[dict[str, Any]]:
        """Take supervised gradient steps, in the order of the trajectories."""
        assert self.state is not None
        prepared, batches = prepare_sft(
            self.tokenizer,
            groups,
            config,
            limit=limit_of(self.state.policy, config.max_seq_length),
            vocabulary=self.state.policy.architecture.vocab_size,
        )
        if not batches:
            logger.warning("step %s trains on nothing: no assistant messages", step + 1)
            yield prepared.metrics
        recording = Recording(self.record, checkpoints, step + 1, self.world)
        steps = self._steps(SUPERVISED, step, recording)
        for samples, rate in zip(batches, config.rates(len(batches)), strict=True):
            steps.learning_rate = rate
            rows = [row.to(self.device) for row in pack(samples, length=None)]
            for metrics in steps.run([rows]):
                yield {**prepared.metrics, **metrics}
        recording.write(prepared)
        path = self._save(self.state, checkpoints, step + 1, lora, parent=step, config=config)
        yield self._result(path, step + 1, prepared.dropped)

    def _steps(
        self, config: GrpoConfig, step: int, recording: Recording, deviation: float = 0.0
    ) -> GradientSteps:
        assert self.state is not None
        given = (self.state, config, step, deviation)
        return GradientSteps(
            *given, base=self._reference, recording=recording, before_row=self.before_row
        )

    def _result(self, path: Path, step: int, dropped: list[dict[str, Any]]) -> dict[str, Any]:
        self._clock.lap("time/save_s")
        laps = self._clock.laps
        return {"checkpoint": str(path), "step": step, "dropped": dropped, "times": laps}

    def _latest(self, checkpoints: Path) -> int | None:
        checkpoint.clean(checkpoints)
        return checkpoint.latest(checkpoints)

    def _state(self, lora: LoraConfig | None, *, fresh: bool = False) -> State:
        """A state with this LoRA. One in memory is used again: loading a base model takes long."""
        self.loaded = None
        if self.state and self.state.policy.lora == lora and (lora or not fresh):
            return self.state.reset() if fresh else self.state
        self.state = None  # few GPUs have memory for two base models
        gc.collect()  # a policy and its compiled layers refer to each other
        # Trained weights are kept in fp32, because bf16 would lose AdamW's small steps.
        policy = self._load_policy(lora, torch.float32 if lora is None else self.dtype)
        self.state = State(policy, seed=lora.seed if lora else 0)
        return self.state

    def _reference(self) -> Policy:
        """Load a frozen copy of the base model, for full finetuning with a KL penalty."""
        policy: Policy = self._load_policy(None, self.dtype).requires_grad_(False)
        return policy

    def _load_policy(self, lora: LoraConfig | None, dtype: torch.dtype) -> Policy:
        load = partial(load_policy, device=self.device, world=self.world, fp8=self.fp8)
        try:
            return load(self.directory, lora, dtype=dtype)
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory(f"The base model does not fit the GPU: {exc}") from exc

    def _load(self, checkpoints: Path, lora: LoraConfig | None, wanted: int | None = None) -> int:
        """Load the run's latest good step into memory, and refuse if another one is `wanted`."""
        newest = self.world.on_first(lambda: checkpoint.newest(checkpoints))
        if newest is not None and self.loaded and self.state and wanted in (None, newest):
            same = self.loaded == self._identity(checkpoints, newest)
            if same and self.state.policy.lora == lora:
                return newest  # this process wrote it, so its files need no verification
        if wanted is not None:
            self.world.on_first(lambda: checkpoint.check_latest(checkpoints, wanted))
        step = self.prepare(checkpoints, lora)
        if self.loaded != self._identity(checkpoints, step):
            self._state(lora).read(checkpoint.path_of(checkpoints, step), self.world)
            self.loaded = self._identity(checkpoints, step)
        return step

    def _identity(self, checkpoints: Path, step: int) -> tuple[Path, int, str]:
        """A run's step with the hash of its weights, because a pull may replace them."""
        path = checkpoint.path_of(checkpoints, step)
        return checkpoints, step, self.world.on_first(lambda: weights_hash(path))

    def _save(
        self,
        state: State,
        checkpoints: Path,
        step: int,
        lora: LoraConfig | None,
        *,
        parent: int | None,
        config: StepConfig | None,
        rows: Sequence[Row] = (),
    ) -> Path:
        metadata = {
            "base_model": self.base_model,
            "lora": lora_shape(lora),
            "parent": parent,
            "config": config.model_dump(mode="json") if config else None,
        }

        def write(directory: Path) -> dict[str, str]:
            if rows:
                plot_rows(rows, directory / PICTURE)
            return state.write(directory, base_model=self.base_model)

        save = partial(checkpoint.save, checkpoints, step, write, metadata)
        # A trained step is in the server's journal until the server has synced it.
        path = Path(self.world.on_first(lambda: str(save(synced=parent is None))))
        self.loaded = self._identity(checkpoints, step)
        return path
