"""A layer of the policy as the GPU wants it: joined projections, flex attention, one compilation.

It computes what `model.Layer` computes for a packed row. The frozen weights of q, k and v, and of
gate and up, are stored side by side and multiplied at once; the modules keep views of their own
part, so every name and every checkpoint stays as it is.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from trainer.activations import FASTEST, Plan, plan
from trainer.architecture import Architecture
from trainer.attention import View
from trainer.tree_mask import Lengths

logger = logging.getLogger(__name__)
Linear = Any  # nn.Linear or model.LoraLinear
LayerFunction = Callable[..., Tensor]


class FastLayers:
    """Runs the layers of one policy, compiled once for every layer and every row of a length."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        architecture: Architecture,
        *,
        backend: str = "inductor",
        free: Callable[[torch.device], int] | None = None,
    ) -> None:
        self.lengths = Lengths()
        self._layers = layers
        self._architecture = architecture
        self._free = free or free_memory
        self._forward: LayerFunction = torch.compile(
            layer_forward, backend=backend, dynamic=False, fullgraph=True
        )
        self._budget = FASTEST.budget
        self._plans: dict[int, Plan] = {}
        for layer in layers:
            join_frozen(layer)

    def __call__(self, x: Tensor, view: View, *, recompute: bool | None = None) -> Tensor:
        """Run x [B, T, D] through the layers.

        `recompute` keeps only the input of each for the backward pass; None does so for as many
        as the free memory asks for.
        """
        mask: Any = view.mask
        options = kernel_options(x.device, self._architecture.head_dim)
        recomputed = 0
        if torch.is_grad_enabled():
            x = x.requires_grad_()  # as in every later layer: the first is no other graph
            recomputed = self._recomputed(x, recompute)
        with functorch_config.patch(activation_memory_budget=self._budget):
            for number, layer in enumerate(self._layers):
                inputs = (layer, x, view.cos, view.sin, mask, options)
                if number < recomputed:
                    x = checkpoint(self._forward, *inputs, use_reentrant=False)
                else:
                    x = self._forward(*inputs)
        return x

    def _recomputed(self, x: Tensor, recompute: bool | None) -> int:
        if recompute is not None:
            return len(self._layers) if recompute else 0
        tokens = x.shape[0] * x.shape[1]
        if tokens not in self._plans:
            free = self._free(x.device)
            chosen = plan(self._architecture, tokens, free, bytes_each=x.element_size())
            logger.info("rows of %s tokens: %s", tokens, chosen)
            self._plans[tokens] = chosen
            if chosen.budget < self._budget:
                # The compiler reads the budget once: what it made under another one is dropped.
                self._budget = chosen.budget
                torch._dynamo.reset()
        return self._plans[tokens].recomputed


def free_memory(device: torch.device) -> int:
    """Bytes we can still allocate, those that torch holds without using them included."""
    if device.type != "cuda":
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)


def layer_forward(
    layer: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask, options: Any
) -> Tensor:
    """One layer on x [B, T, D]: `model.Layer` with joined projections and flex attention."""
    attention = layer.attn
    batch, length, _ = x.shape
    heads = (batch, length, -1, attention.head_dim)
    q, k, v = (
        part.view(heads) for part in project(normed(x, layer.sa_norm), attention_inputs(layer))
    )
    if attention.q_norm is not None:
        q, k = normed(q, attention.q_norm), normed(k, attention.k_norm)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    v = v.contiguous()  # else the whole product is kept for the backward pass, for its sake
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    attended: Any = flex_attention(
        q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options
    )
    (out,) = project(attended.transpose(1, 2).flatten(2), [attention.output_proj])
    x = x + out
    gate, up = project(normed(x, layer.mlp_norm), mlp_inputs(layer))
    (out,) = project(silu(gate) * up, [layer.mlp.w2])
    return x + out


def kernel_options(device: torch.device, head_dim: int) -> dict[str, int] | None:
    """Larger tiles than torch's own in the forward pass on Hopper: 1.37 against 1.54 ms there."""
    if (
        device.type != "cuda"
        or head_dim > 128
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return None
    return {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 128,
        "fwd_num_warps": 8,
        "fwd_num_stages": 2,
    }


def normed(x: Tensor, norm: Any) -> Tensor:
    """The plain formula, in fp32: the compiler makes the passes over it few."""
    return rms_norm(x.float(), norm.normalized_shape, norm.scale, norm.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [B, T, H, E], again as the plain formula."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention_inputs(layer: Any) -> list[Linear]:
    return [layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj]


def mlp_inputs(layer: Any) -> list[Linear]:
    return [layer.mlp.w1, layer.mlp.w3]


def project(x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """What each of `linears` makes of x; all of them in one multiplication if they are joined."""
    joined = getattr(linears[0], "joined", None)
    if joined is None:
        return [_with_lora(linear(x, one.weight, one.bias), x, [one]) for one in linears]
    sizes = [one.weight.shape[0] for one in linears]
    return torch.split(_with_lora(linear(x, *joined), x, linears), sizes, dim=-1)


def _with_lora(out: Tensor, x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Add the LoRAs of `linears`, which lie side by side in `out`."""
    downs, ups = [], []
    for one in linears:
        if hasattr(one, "lora_a") and not one.disabled:
            downs.append(one.lora_a.weight)
            ups.append(one.lora_b.weight * (one.alpha / one.rank))
        else:
            ups.append(out.new_zeros(one.weight.shape[0], 0))
    if not downs:
        return out
    low = linear(x, torch.cat(downs).to(x.dtype))
    # One product with the B matrices on the diagonal, so that its gradient stays in one piece;
    # and a sum, not `addmm`, since the compiler joins that with what comes next.
    up: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
    return out + linear(low, up.to(x.dtype))


def join_frozen(layer: nn.Module) -> None:
    """Store weights that are multiplied with the same input side by side; a trained one is not."""
    for linears in (attention_inputs(layer), mlp_inputs(layer)):
        if any(one.weight.requires_grad for one in linears):
            continue
        weight = torch.cat([one.weight.detach() for one in linears])
        biases = [one.bias for one in linears]
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        linears[0].joined = (weight, bias)
        at = 0
        for one in linears:
            one.weight = nn.Parameter(weight[at : at + len(one.weight)], requires_grad=False)
            at += len(one.weight)
