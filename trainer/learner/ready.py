"""`Ready`: a request's samples and rows, packed before its step begins. It needs no GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.base_model.tokenizer import Tokenizer
from trainer.learner.pack import Row, pack
from trainer.learner.prepare import Group, Prepared, prepare
from trainer.learner.state import State
from trainer.policy.model import Policy
from trainer.step_config import GrpoConfig


@dataclass(frozen=True)
class Ready:
    """The samples and rows of a request, for the step that follows `step` with `config`."""

    groups: Sequence[Group]
    config: GrpoConfig
    step: int
    prepared: Prepared
    rows: list[Row]


def get_ready(
    tokenizer: Tokenizer,
    policy: Policy,
    groups: Sequence[Group],
    config: GrpoConfig,
    step: int,
    *,
    full: bool,
) -> Ready:
    """Prepare and pack a request's groups."""
    length = config.packed_sequence_length
    limit = limit_of(policy, config.max_seq_length, length)
    vocabulary = policy.architecture.vocab_size
    prepared = prepare(tokenizer, groups, config, limit=limit, vocabulary=vocabulary, step=step)
    rows = pack(prepared.samples, length=length, full=full) if prepared.samples else []
    return Ready(groups, config, step, prepared, rows)


def limit_of(policy: Policy, *given: int | None) -> int:
    """The most tokens of a sequence: the model's own limit, or a smaller one that is given."""
    limits: list[int | None] = [policy.max_seq_len, *given]
    return min(limit for limit in limits if limit is not None)


def batches_of(ready: Ready, state: State, device: torch.device, processes: int) -> list[list[Row]]:
    """The rows of each gradient step, in random order drawn from the run's generator."""
    prepared, rows, config = ready.prepared, ready.rows, ready.config
    if not rows:
        return []
    order = torch.randperm(len(rows), generator=state.generator).tolist()
    prepared.metrics |= {
        "data/step_num_rows": float(len(rows)),
        "data/step_packed_tokens": float(sum(len(row.tokens) for row in rows)),
        "data/step_unshared_tokens": float(sum(row.unshared for row in rows)),
    }
    size = config.grad_accumulation_sequences or processes
    return [
        [rows[index].to(device) for index in order[at : at + size]]
        for at in range(0, len(order), size)
    ]
