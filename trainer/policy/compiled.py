"""Runs a policy's layers on a GPU: compiled once, saving as many activations as memory allows."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from trainer.base_model.architecture import Architecture
from trainer.policy.attention import View
from trainer.policy.compiled_layer import (
    RowMask,
    fuses,
    join_frozen,
    layer_forward,
    row_mask,
)
from trainer.policy.logprobs import Columns, fp8_columns
from trainer.policy.recompute import FASTEST, Plan, plan
from trainer.policy.tree_mask import Lengths, TreeMask

logger = logging.getLogger(__name__)
LayerFunction = Callable[..., Tensor]
VARIANTS = 128  # compiled forms of a layer; with torch's default limit of 8, steps would fail


class CompiledLayers:
    """Runs the layers of one policy. All layers and all rows of one length share a compilation."""

    def __init__(
        self,
        layers: Sequence[Any],
        architecture: Architecture,
        *,
        backend: str = "inductor",
        free: Callable[[torch.device], int] | None = None,
        fp8: bool = False,
        sharded: bool = False,
    ) -> None:
        """`sharded` layers were joined by `trainer.policy.shards`, before they had weights."""
        self.lengths = Lengths()
        self._layers = layers
        self._fp8 = fp8
        self._head: list[Columns] | None = None
        self._sharded = sharded
        self._architecture = architecture
        self._free = free or free_memory
        self._forward: LayerFunction = torch.compile(
            layer_forward, backend=backend, dynamic=False, fullgraph=True
        )
        # There is a variant for each length, with and without gradients, with and without the LoRA.
        torch._dynamo.config.recompile_limit = VARIANTS
        self._caution = 1.0
        self._budget = FASTEST.budget
        self._plans: dict[int, Plan] = {}
        if sharded:
            return
        for layer in layers:
            join_frozen(layer, fp8=fp8)
        torch.cuda.empty_cache()  # the separate weights: half of the model, in pieces too small

    def __call__(self, x: Tensor, view: View, *, recompute: bool | None = None) -> Tensor:
        """Run x [B, T, D] through the layers.

        With `recompute`, each layer saves only its input for the backward pass. None does so for
        as many layers as the free memory requires.
        """
        assert isinstance(view.mask, TreeMask)
        row = row_mask(view.mask, x.dtype, self._architecture.head_dim)
        recomputed = 0
        if torch.is_grad_enabled():
            x = x.requires_grad_()  # as in later layers, so that the first needs no other graph
            recomputed = self._recomputed(x, recompute)
        with functorch_config.patch(activation_memory_budget=self._budget):
            for number, layer in enumerate(self._layers):
                inputs = (layer, x, view.cos, view.sin, row)
                run = self._gathered if self._sharded else self._forward
                if number < recomputed:
                    x = checkpoint(run, *inputs, use_reentrant=False)
                else:
                    x = run(*inputs)
        return x

    def _gathered(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, row: RowMask) -> Tensor:
        """Run a sharded layer as a module: FSDP gathers its weights in hooks of `forward`."""
        out: Tensor = layer(x, None, lambda x: self._forward(layer, x, cos, sin, row))
        return out

    def head_columns(self, head: Tensor) -> list[Columns] | None:
        """The frozen head in fp8, for the gradient, if the layers are in fp8 too."""
        if self._fp8 and self._head is None and torch.is_grad_enabled():
            self._head = fp8_columns(head.detach())
        return self._head

    def plan_with_less_memory(self) -> None:
        """Plan with a fifth less memory from now on, because a plan did not fit."""
        self._caution *= 0.8
        self._plans.clear()

    def _recomputed(self, x: Tensor, recompute: bool | None) -> int:
        if recompute is not None:
            return len(self._layers) if recompute else 0
        tokens = x.shape[0] * x.shape[1]
        if tokens not in self._plans:
            fused = fuses(x, self._layers[0].mlp)
            chosen = plan(
                self._architecture,
                tokens,
                int(self._free(x.device) * self._caution) - self._bytes_to_reserve(),
                bytes_each=x.element_size(),
                fused=fused,
                rank=self._layers[0].mlp.w1.rank if fused else 0,
            )
            logger.info("rows of %s tokens: %s", tokens, chosen)
            self._plans[tokens] = chosen
            if chosen.budget < self._budget:
                # The compiler reads the budget only once, so drop what it compiled before.
                self._budget = chosen.budget
                torch._dynamo.reset()
        return self._plans[tokens].recomputed

    def _bytes_to_reserve(self) -> int:
        """Bytes of gradients and AdamW's moments that are not allocated before the first step."""
        trained = [it for layer in self._layers for it in layer.parameters() if it.requires_grad]
        return sum(12 * it.numel() for it in trained if it.grad is None)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated, including those that torch has reserved but not used."""
    if device.type != "cuda":
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
