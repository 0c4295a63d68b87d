"""Makes vLLM on a Hopper GPU add LoRAs with our kernels while requests decode.

With 512 requests of a 4B shape, vLLM's kernels take 90 us a layer, half of it between twelve short
kernels (`bench/lora_kernels.py`). Long prompts stay with vLLM. vLLM's workers load this file, so it
imports nothing of ours. A vLLM that lacks what is needed here adds LoRAs as it would without us.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.lora_linear")
MOST_TOKENS = 2048
MOST_SLICES = 3
LARGEST_RANK = 64


def fits(x: torch.Tensor, a: list[torch.Tensor]) -> bool:
    """Return whether our kernels compute this product, and are faster."""
    return (
        len(x) <= MOST_TOKENS
        and len(a) <= MOST_SLICES
        and a[0].shape[-2] <= LARGEST_RANK
        and x.dtype == a[0].dtype
        and x.is_contiguous()
    )


@functools.cache
def suits() -> bool:
    """Return whether this GPU is one that our kernels are for, and may sum in any order."""
    ordered = os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"
    return torch.cuda.get_device_capability() == (9, 0) and not ordered


def install(
    wrapper: Any,
    register: Callable[..., None],
    vllm_ops: Any,
    add: Callable[..., None],
    suits: Callable[[], bool],
) -> None:
    """Let `add` compute LoRAs in vLLM's `wrapper`, a class, by an operator of its own.

    `suits` says whether `add` is for this GPU.
    """
    own = wrapper.add_lora_linear

    def lora_linear(
        y: torch.Tensor,
        x: torch.Tensor,
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        mapping: torch.Tensor,
        sorted_tokens: torch.Tensor,
        counts: torch.Tensor,
        starts: torch.Tensor,
        loras: torch.Tensor,
        none: torch.Tensor,
        active: torch.Tensor,
        scale: float,
    ) -> None:
        if none.item() or not len(x):  # a tensor of the CPU
            return
        if fits(x, a) and suits():
            add(y, x, a, b, mapping, sorted_tokens, counts, scale)
            return
        batch = (mapping, sorted_tokens, counts, starts, loras, none, active)
        low = torch.empty(len(a), len(x), a[0].shape[-2], dtype=torch.float32, device=x.device)
        vllm_ops.lora_shrink(x, a, low, *batch, scale)
        vllm_ops.lora_expand(low, b, y, *batch, 0, True)

    def replaced(
        self: Any, y: Any, x: Any, a: Any, b: Any, scale: float, slices: Any, **others: Any
    ) -> None:
        if others:  # such as a result without the frozen product
            own(self, y, x, a, b, scale, slices, **others)
            return
        x = x.view(-1, x.shape[-1])
        special = self.lora_config.specialize_active_lora
        batch = self.token_mapping_meta.meta_args(x.size(0), special)
        vllm_ops.art_lora_linear(y.view(-1, y.shape[-1]), x, list(a), list(b), *batch, scale)

    register(
        op_name="art_lora_linear",
        op_func=lora_linear,
        mutates_args=["y"],
        fake_impl=lambda *_, **__: None,
    )
    wrapper.add_lora_linear = replaced


try:
    from lora_kernel import add_lora  # type: ignore[import-not-found]  # beside this file
    from vllm.lora.ops import triton_ops  # noqa: F401  # defines vLLM's own operators
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.utils.torch_utils import direct_register_custom_op

    install(PunicaWrapperGPU, direct_register_custom_op, torch.ops.vllm, add_lora, suits)
except (ImportError, AttributeError) as error:
    logger.warning("adding LoRAs without our kernels: %s", error)
