"""Takes the gradient steps of one train call: logprobs, loss, backward, clip, AdamW."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.errors import Diverged, Unsupported
from trainer.learner.grpo import LossInputs, effective_sample_size, grpo_loss
from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.learner.prepare import Metrics
from trainer.learner.record import Recording
from trainer.learner.state import ADAPTER, State, read_tensors
from trainer.learner.world import World
from trainer.policy.attention import Mask
from trainer.policy.model import Policy, load_lora, lora_state
from trainer.policy.tree_mask import tree_mask
from trainer.step_config import GrpoConfig


@dataclass(frozen=True)
class FixedLogprobs:
    """Logprobs [N] of a row, computed before the first gradient step."""

    old: Tensor
    reference: Tensor | None


class Taken:
    """A gradient step that was taken, or that a GPU still computes."""

    def __init__(
        self, sums: dict[str, Tensor], norm: Tensor, tokens: int, learning_rate: float
    ) -> None:
        self._names = list(sums)
        self._tokens = tokens
        self._learning_rate = learning_rate
        # One copy for all numbers, begun now: a later one would wait for the next step too.
        numbers = torch.stack([it.double() for it in (*sums.values(), norm)])
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if numbers.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record()

    def metrics(self) -> Metrics:
        """Wait for the step and return its metrics. Raises `Diverged`."""
        if self._copied:
            self._copied.synchronize()
        *values, length = self._numbers.tolist()
        metrics = {
            name: value / self._tokens for name, value in zip(self._names, values, strict=True)
        }
        metrics |= {"loss/grad_norm": length, "loss/learning_rate": self._learning_rate}
        metrics["loss/effective_sample_size"] = effective_sample_size(metrics)
        for name, number in metrics.items():
            if not math.isfinite(number):
                raise Diverged(f"`{name}` is `{number}`: nothing of this step is kept")
        return metrics


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
        recording: Recording,
        before_row: Callable[[], None],
    ) -> None:
        self.world = recording.world
        self.before_row = before_row
        self.state = state
        self.config = config
        self.recording = recording
        self.base = base  # loads the base model: full finetuning with a KL penalty needs it
        self.learning_rate = config.rate_after(step)
        if config.scale_learning_rate_by_reward_std_dev:
            self.learning_rate *= reward_std_dev
        for group in state.optimizer.param_groups:
            group["betas"] = (config.adam_beta1, config.adam_beta2)
            group["eps"] = config.adam_epsilon
            group["weight_decay"] = config.weight_decay
        recompute = config.activation_checkpointing
        if recompute is None and self.world.size > 1:
            # All processes must do the same, and none may run out of memory.
            recompute = state.parameters[0].is_cuda
        state.policy.activation_checkpointing = recompute

    def run(self, batches: list[list[Row]]) -> Iterator[Metrics]:
        """Take one gradient step for each batch of rows."""
        self.recording.begin(batches)
        mine = [self.world.share(batch) for batch in batches]
        fixed = self._fixed_logprobs([[row for row, _ in rows] for rows in mine])
        before: Taken | None = None
        for batch, rows, logprobs in zip(batches, mine, fixed, strict=True):
            taken = self._step(batch, rows, logprobs)
            if before is not None:
                # While this waits for the step before, a GPU already computes the new one.
                yield before.metrics()
            before = taken
        if before is not None:
            yield before.metrics()

    def _step(
        self, batch: list[Row], rows: list[tuple[Row, float]], fixed: list[FixedLogprobs]
    ) -> Taken:
        """Take one gradient step over `batch`; this process computes `rows` of it."""
        optimizer, config = self.state.optimizer, self.config
        learning_rate = self.learning_rate * (
            len({sample.trajectory for row in batch for sample in row.samples})
            ** config.num_trajectories_learning_rate_multiplier_power
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(row.targets) for row in batch)
        sums: dict[str, Tensor] = {}
        for (row, weight), logprobs in zip(rows, fixed, strict=True):
            output = grpo_loss(self._inputs(row, logprobs), config)
            (output.loss * weight / tokens).backward()  # type: ignore[no-untyped-call]
            for name, value in output.metrics.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value * weight
        self.world.sum([*sums.values(), *self._gradients()])
        norm = torch.nn.utils.clip_grad_norm_(self.state.parameters, config.max_grad_norm)
        optimizer.step()
        return Taken(sums, norm, tokens, learning_rate)

    def _gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.state.parameters]
        return [gradient for gradient in gradients if gradient is not None]

    def _inputs(self, row: Row, fixed: FixedLogprobs) -> LossInputs:
        logprobs, entropies = self._logprobs(row)
        self.recording.add(row, logprobs)
        return LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=fixed.old,
            sampler_logprobs=row.sampler_logprobs,
            advantages=row.advantages,
            weights=row.weights,
            sequences=row.sequences,
            reference_logprobs=fixed.reference,
        )

    @torch.no_grad()
    def _fixed_logprobs(self, batches: list[list[Row]]) -> list[list[FixedLogprobs]]:
        config = self.config
        recompute = config.precalculate_logprobs or config.truncated_importance_sampling is not None
        old = [
            [self._logprobs(row)[0] if recompute else row.sampler_logprobs for row in batch]
            for batch in batches
        ]
        with self._reference() as reference:
            return [
                [
                    FixedLogprobs(logprobs, reference(row) if reference else None)
                    for row, logprobs in zip(batch, olds, strict=True)
                ]
                for batch, olds in zip(batches, old, strict=True)
            ]

    @contextmanager
    def _reference(self) -> Iterator[Callable[[Row], Tensor] | None]:
        """Yield a function that returns the reference's logprobs, and restore the policy after."""
        config, policy = self.config, self.state.policy
        if not config.kl_penalty_coef:
            yield None
        elif config.kl_ref_adapter_path is not None:
            if policy.lora is None:
                raise Unsupported("`kl_ref_adapter_path` needs a run that trains a LoRA")
            with borrowed_lora(policy, Path(config.kl_ref_adapter_path), self.world):
                yield lambda row: self._logprobs(row)[0]
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
        self.before_row()
        return row_logprobs(
            self.state.policy, row, chunk=self.config.logprob_calculation_chunk_size
        )


@contextmanager
def borrowed_lora(policy: Policy, checkpoint: Path, world: World) -> Iterator[None]:
    """Give the policy the LoRA of a checkpoint, and its own one back afterwards."""
    ours = {name: tensor.clone() for name, tensor in lora_state(policy).items()}
    try:
        load_lora(policy, world.tensors(lambda: read_tensors(checkpoint / ADAPTER)))
        yield
    finally:
        load_lora(policy, ours)


def row_logprobs(policy: Policy, row: Row, *, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N] of a row's chosen tokens."""
    tokens, positions = row.tokens, row.positions
    mask: Mask
    if policy.compiled is None:
        mask = row.attention_mask()
    else:
        length = policy.compiled.lengths.fit(row.capacity)
        mask = tree_mask(row.ends, length, device=tokens.device)
        tokens, positions = (pad(part, (0, length - len(part))) for part in (tokens, positions))
    return policy.logprobs(
        tokens[None],
        mask=mask,
        positions=positions[None],
        predictors=row.predictors,
        targets=row.targets,
        chunk=chunk,
    )


def completion_logprobs(
    policy: Policy, prompt_ids: list[int], completion_ids: list[int], *, compiled: bool
) -> list[float]:
    """Logprobs of a completion. Compiling is not worth it for a few tokens, unless `compiled`."""
    ids = prompt_ids + completion_ids
    mask = [False] * len(prompt_ids) + [True] * len(completion_ids)
    sample = Sample(ids, mask, [0.0] * len(ids), 0.0, 1.0, group=0, trajectory=0)
    (row,) = pack([sample], length=None)
    layers = policy.compiled
    if not compiled:
        policy.compiled = None
    try:
        device = next(policy.parameters()).device
        scores: list[float] = row_logprobs(policy, row.to(device))[0].tolist()
    finally:
        policy.compiled = layers
    return scores
