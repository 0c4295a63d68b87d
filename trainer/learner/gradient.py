"""The gradient steps of one train call: logprobs, loss, backward, clip, AdamW."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.config import GrpoConfig
from trainer.errors import Diverged, Unsupported
from trainer.learner.grpo import LossInputs, grpo_loss
from trainer.learner.pack import Row
from trainer.learner.prepare import Metrics
from trainer.learner.state import ADAPTER, State, read_tensors
from trainer.learner.world import World
from trainer.policy.attention import Mask
from trainer.policy.model import Policy, load_lora, lora_state
from trainer.policy.tree_mask import tree_mask


@dataclass(frozen=True)
class Before:
    """Logprobs [N] of a row that are fixed before the first gradient step."""

    old: Tensor
    reference: Tensor | None


class GradientSteps:
    """Takes the gradient steps that follow checkpoint `step`."""

    def __init__(
        self,
        state: State,
        config: GrpoConfig,
        step: int,
        reward_std_dev: float,
        *,
        base: Callable[[], Policy],
        world: World,
    ) -> None:
        self.world = world
        self.state = state
        self.config = config
        self.base = base  # loads the base model; only full finetuning under a penalty needs it
        self.learning_rate = config.learning_rate * schedule(config, step)
        if config.scale_learning_rate_by_reward_std_dev:
            self.learning_rate *= reward_std_dev
        for group in state.optimizer.param_groups:
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_epsilon
            group["weight_decay"] = config.weight_decay
        asked = config.activation_checkpointing
        if asked is None and world.size > 1:
            asked = state.parameters[0].is_cuda  # all processes must do alike, and none runs out
        state.policy.activation_checkpointing = asked

    def run(self, batches: list[list[Row]]) -> Iterator[Metrics]:
        """One gradient step for each batch of rows."""
        mine = [self.world.share(batch) for batch in batches]
        before = self._before([[row for row, _ in rows] for rows in mine])
        for batch, rows, known in zip(batches, mine, before, strict=True):
            yield self._take(batch, rows, known)

    def _take(
        self, batch: list[Row], rows: list[tuple[Row, float]], before: list[Before]
    ) -> Metrics:
        """One gradient step over `batch`, of which `rows` are computed in this process."""
        optimizer, config = self.state.optimizer, self.config
        learning_rate = self.learning_rate * (
            sum(row.trajectories for row in batch)
            ** config.num_trajectories_learning_rate_multiplier_power
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(row.targets) for row in batch)
        sums: dict[str, Tensor] = {}
        for (row, weight), known in zip(rows, before, strict=True):
            output = grpo_loss(self._inputs(row, known), config)
            (output.loss * weight / tokens).backward()  # type: ignore[no-untyped-call]
            for name, value in output.metrics.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value * weight
        self.world.sum([*sums.values(), *self._gradients()])
        norm = torch.nn.utils.clip_grad_norm_(self.state.parameters, config.max_grad_norm)
        metrics = {name: float(value) / tokens for name, value in sums.items()}
        metrics |= {"loss/grad_norm": float(norm), "loss/learning_rate": learning_rate}
        for name, number in metrics.items():
            if not math.isfinite(number):
                raise Diverged(f"`{name}` is `{number}`: the gradient step was not taken")
        optimizer.step()
        return metrics

    def _gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.state.parameters]
        return [gradient for gradient in gradients if gradient is not None]

    def _inputs(self, row: Row, before: Before) -> LossInputs:
        logprobs, entropies = self._logprobs(row)
        return LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=before.old,
            sampler_logprobs=row.sampler_logprobs,
            advantages=row.advantages,
            weights=row.weights,
            sequences=row.sequences,
            reference_logprobs=before.reference,
        )

    @torch.no_grad()
    def _before(self, batches: list[list[Row]]) -> list[list[Before]]:
        config = self.config
        own = config.precalculate_logprobs or config.truncated_importance_sampling is not None
        old = [
            [self._logprobs(row)[0] if own else row.sampler_logprobs for row in batch]
            for batch in batches
        ]
        with self._reference() as reference:
            return [
                [
                    Before(known, reference(row) if reference else None)
                    for row, known in zip(batch, olds, strict=True)
                ]
                for batch, olds in zip(batches, old, strict=True)
            ]

    @contextmanager
    def _reference(self) -> Iterator[Callable[[Row], Tensor] | None]:
        """Gives the reference's logprobs of a row; the policy is itself again afterwards."""
        config, policy = self.config, self.state.policy
        if not config.kl_penalty_coef:
            yield None
        elif config.kl_ref_adapter_path is not None:
            if policy.lora is None:
                raise Unsupported("`kl_ref_adapter_path` needs a run that trains a LoRA")
            ours = {name: tensor.clone() for name, tensor in lora_state(policy).items()}
            path = Path(config.kl_ref_adapter_path) / ADAPTER
            load_lora(policy, self.world.tensors(lambda: read_tensors(path)))
            try:
                yield lambda row: self._logprobs(row)[0]
            finally:
                load_lora(policy, ours)
        elif policy.lora is not None:
            policy.set_lora_enabled(False)
            try:
                yield lambda row: self._logprobs(row)[0]
            finally:
                policy.set_lora_enabled(True)
        else:
            base = self.base()
            yield lambda row: row_logprobs(base, row)[0]

    def _logprobs(self, row: Row) -> tuple[Tensor, Tensor]:
        return row_logprobs(
            self.state.policy, row, chunk=self.config.logprob_calculation_chunk_size
        )


def row_logprobs(policy: Policy, row: Row, *, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N] of a row's chosen tokens."""
    tokens, positions = row.tokens, row.positions
    mask: Mask
    if policy.compiled is None:
        mask = row.attention_mask()
    else:
        length = policy.compiled.lengths.fit(row.capacity)
        mask = tree_mask(row.ends, length, separate=row.separate, device=tokens.device)
        tokens, positions = (pad(part, (0, length - len(part))) for part in (tokens, positions))
    return policy.logprobs(
        tokens[None],
        mask=mask,
        positions=positions[None],
        predictors=row.predictors,
        targets=row.targets,
        chunk=chunk,
    )


def schedule(config: GrpoConfig, step: int) -> float:
    """Share of the learning rate at the train call that follows `step`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.lr_scheduler_type == "constant":
        return 1.0
    assert config.max_steps is not None  # the config has checked it
    span = max(config.max_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    if config.lr_scheduler_type == "linear":
        return 1 - progress
    return (1 + math.cos(math.pi * progress)) / 2
