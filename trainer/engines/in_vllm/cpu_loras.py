"""Keeps LoRAs away from requests for the base model where vLLM runs on a CPU.

vLLM 0.32.0 marks their tokens with -1 and takes that as an index, so they get the last LoRA if
their batch has requests with a LoRA (vllm-project/vllm#48421). Its kernels for GPUs skip them.
vLLM's workers load this file by `worker_extension_cls`, so it imports nothing of ours.
"""

import logging
from typing import Any

import torch

logger = logging.getLogger("vllm.cpu_loras")


def install(operators: Any, wrapper: Any) -> None:
    """Correct the first product of a LoRA in two modules of vLLM: the second one adds zeros."""
    own = operators.bgmv_shrink

    def shrink(
        x: torch.Tensor, a: torch.Tensor, low: torch.Tensor, numbers: torch.Tensor, *scale: float
    ) -> None:
        own(x, a, low, numbers, *scale)
        low[numbers < 0] = 0

    # The product for prompts calls the name in the first module, that for decoding in the second.
    operators.bgmv_shrink = wrapper.bgmv_shrink = shrink


class Worker:
    """What vLLM adds to its workers: nothing, since importing this file is enough."""


try:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    install(lora_ops, punica_cpu)
except (ImportError, AttributeError) as error:
    logger.warning("requests for the base model may get a LoRA: %s", error)
