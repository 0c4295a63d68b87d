"""Compiles what the first steps on a GPU need, while the engine starts.

One layer is enough, because all layers share a compilation. It takes little memory, so that vLLM
may start on the same GPU meanwhile.
"""

import logging
import time
from pathlib import Path

import torch

from trainer.config import LoraConfig
from trainer.learner.gradient import completion_logprobs, row_logprobs
from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.compiled import CompiledLayers
from trainer.policy.model import load_model
from trainer.policy.tree_paths import KEYS_PER_TOKEN

logger = logging.getLogger(__name__)
LENGTHS = (2048, 4096, 6144, 8192)
"""Tokens of rows as they are packed by default: the longest sequence, rounded up to 2,048."""


def warm_up(
    directory: Path,
    lora: LoraConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    fp8: bool = False,
    backend: str = "inductor",
) -> None:
    """Compile the layers of the model in `directory` for rows of the usual lengths."""
    started = time.monotonic()
    policy = load_model(directory, lora=lora, dtype=dtype, device=device, layers=1)
    policy.compiled = CompiledLayers(policy.layers, policy.architecture, backend=backend, fp8=fp8)
    for length in LENGTHS:
        for row in rows(length):
            logprobs, _ = row_logprobs(policy, row.to(device))
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        completion_logprobs(policy, [1] * 16, [2] * 16, compiled=fp8)  # as the canary does
    logger.info("compiled in %.1f s", time.monotonic() - started)


def rows(length: int) -> list[Row]:
    """Rows for each kind of attention: sharing little, sharing much, and sharing nothing."""

    def sample(prompt: list[int], own: int, number: int, group: int) -> Sample:
        ids = prompt + [number] * own
        mask = [False] * len(prompt) + [True] * own
        return Sample(ids, mask, [0.0] * len(ids), 1.0, 1.0, group=group, trajectory=number)

    little = [sample([1] * 64, 64, number, group=0) for number in (2, 3)]
    # So many copies of the prompt are too many, so that this row keeps the mask.
    numbers = range(2, 2 + 2 * KEYS_PER_TOKEN)
    much = [sample([1] * (length // 2), 64, number, group=0) for number in numbers]
    nothing = [sample([number], 127, number, group=number) for number in (2, 3)]
    return [row for samples in (little, much, nothing) for row in pack(samples, length=length)]
