"""Makes vLLM on a Hopper GPU sample with our kernels.

vLLM computes a random number for each of 151,936 words of each request, and its logprobs wait for
one sum after another. Results have the same distribution, but a seed gives other tokens than in
vLLM alone. vLLM's workers load this file, so it imports nothing of ours. A vLLM that lacks what is
needed here samples as it would without us.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.token_sampling")


@functools.cache
def on_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def install(sampler: Any, logprob: Any, kernels: Any, fits: Callable[[torch.Tensor], bool]) -> None:
    """Let `kernels` sample in vLLM's modules `sampler` and `logprob`, from logits that fit."""
    own_sample: Callable[..., torch.Tensor] = sampler.gumbel_sample
    own_logprobs: Callable[..., torch.Tensor] = logprob.compute_token_logprobs

    def sample(
        logits: torch.Tensor, requests: torch.Tensor, temperatures: torch.Tensor,
        seeds: torch.Tensor, positions: torch.Tensor, apply_temperature: bool = False,
        **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        given = (logits, requests, temperatures, seeds, positions)
        special = any(one is not None and one is not False for one in others.values())
        if apply_temperature or special or not fits(logits):
            return own_sample(*given, apply_temperature=apply_temperature, **others)
        places = requests.contiguous(), positions.contiguous()
        found: torch.Tensor = kernels.sample(logits, places[0], temperatures, seeds, places[1])
        return found

    def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (kernels.logprobs if fits(logits) else own_logprobs)(logits, tokens)

    sampler.gumbel_sample, logprob.compute_token_logprobs = sample, logprobs


try:
    import sampling_kernel  # type: ignore[import-not-found]  # beside this file
    from vllm.v1.worker.gpu.sample import logprob, sampler

    install(
        sampler,
        logprob,
        sampling_kernel,
        lambda logits: on_hopper() and bool(sampling_kernel.fits(logits)),
    )
except (ImportError, AttributeError) as error:
    logger.warning("sampling without our kernels: %s", error)
