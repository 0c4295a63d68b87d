"""One layer of the policy in a form that is fast on a GPU: joined projections and our kernels.

It computes what `model.Layer` computes for a packed row. The frozen weights of q, k and v, and of
gate and up, are stored side by side and multiplied at once. The modules keep views of their own
parts, so names and checkpoints do not change. Weights are read at each call, because FSDP replaces
the parameters of a layer before the layer runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import linear, rms_norm, silu

from trainer.policy.attention import attend as attend_densely
from trainer.policy.kernels import tree_attention
from trainer.policy.kernels.fp8 import Fp8Weight, fp8_linear, quantised_weight
from trainer.policy.tree_mask import TreeMask

Linear = Any  # nn.Linear or model.LoraLinear
LARGEST_RANK = 64  # tested with the MLP kernel
# Layers that multiply the same input. The first one holds the joined weights.
JOINED = (("attn.q_proj", "attn.k_proj", "attn.v_proj"), ("mlp.w1", "mlp.w3"))


class RowMask(NamedTuple):
    """The mask of a row and, for flex attention, its tile sizes."""

    mask: BlockMask | Tensor | tuple[Tensor, list[Tensor], Tensor, list[Tensor], list[Tensor]]
    tiles: Any


def row_mask(tree: TreeMask, dtype: torch.dtype, head_dim: int) -> RowMask:
    """The mask for the fastest attention kernel that this GPU supports."""
    device = tree.ends.device
    if device.type == "cpu" and torch.is_grad_enabled():
        # Flex attention has no backward pass on a CPU, where only tests compile layers.
        at = torch.arange(len(tree.ends))
        return RowMask(((at <= at[:, None]) & (at[:, None] < tree.ends))[None], None)
    fits = dtype == torch.bfloat16 and head_dim == tree_attention.HEAD_DIM
    if fits and tree_attention.available(device):
        *paths, counts = tree.paths
        return RowMask((tree.ends, paths, counts, tree.by_query(), tree.by_key()), None)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if not hopper or head_dim > 128 or dtype != torch.bfloat16:
        return RowMask(tree.blocks, None)
    # Larger tiles than torch's default for the forward pass: 1.37 instead of 1.54 ms.
    tiles = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 2}
    return RowMask(tree.blocks, tiles)


def layer_forward(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, row: RowMask) -> Tensor:
    """One layer on x [B, T, D]."""
    attended = attend(*heads(normed(x, layer.sa_norm), layer.attn, cos, sin), row)
    (out,) = project(attended.flatten(2), [layer.attn.output_proj])
    x = x + out
    return x + mlp(normed(x, layer.mlp_norm), layer.mlp)


def heads(x: Tensor, attention: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q [B, T, H, E] and k [B, T, K, E], and v [B, T, K, E]."""
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    shape, size = (*x.shape[:2], -1, attention.head_dim), attention.head_dim
    fused = x.is_cuda and all(map(has_lora, linears)) and hasattr(linears[0], "joined_weight")
    norms = [attention.q_norm, attention.k_norm]
    if fused and kernel_norms(*norms) and size & (size - 1) == 0:
        from trainer.policy.kernels.split_heads import (
            split_heads,  # needs Triton, which is absent on a CPU
        )

        base, lora = products(x, joined_of(linears[0]), linears)
        assert lora is not None
        base, lora = base.flatten(0, 1), lora.flatten(0, 1)
        turns = (part.flatten(0, 2) for part in (cos, sin))
        given = (base, lora, *turns, attention.num_heads, attention.num_kv_heads)
        scales = [] if norms[0] is None else [*(one.scale for one in norms), norms[0].eps]
        q, k, v = (part.view(shape) for part in split_heads(*given, *scales)[:3])
        return q, k, v
    q, k, v = (part.view(shape) for part in project(x, linears))
    if attention.q_norm is not None:
        q, k = normed(q, attention.q_norm), normed(k, attention.k_norm)
    # As a view, v would keep the whole product alive until the backward pass.
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def kernel_norms(q_norm: Any, k_norm: Any) -> bool:
    """Whether the kernel that splits heads can norm them. It has no gradient for the scales."""
    if q_norm is None or k_norm is None:
        return q_norm is k_norm
    trained = q_norm.scale.requires_grad or k_norm.scale.requires_grad
    return bool(q_norm.eps == k_norm.eps and not trained)


def attend(q: Tensor, k: Tensor, v: Tensor, row: RowMask) -> Tensor:
    """Softmax attention; all tensors are [B, T, heads, E]."""
    if isinstance(row.mask, Tensor):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return attend_densely(q, k, v, row.mask).transpose(1, 2)
    if not isinstance(row.mask, BlockMask):
        return tree_attention.tree_attention(q, k, v, *row.mask)[0]  # type: ignore[no-any-return]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out: Any = flex_attention(
        q, k, v, block_mask=row.mask, enable_gqa=True, kernel_options=row.tiles
    )
    result: Tensor = out.transpose(1, 2)
    return result


def fuses(x: Tensor, layer: Any) -> bool:
    """Whether the MLP kernel can run this MLP: bf16 on a GPU, with a LoRA on all its layers."""
    linears = [layer.w1, layer.w3, layer.w2]
    fits = x.is_cuda and x.dtype == torch.bfloat16 and all(map(has_lora, linears))
    return bool(fits and layer.w1.rank <= LARGEST_RANK and hasattr(layer.w1, "joined_weight"))


def mlp(x: Tensor, layer: Any) -> Tensor:
    gate, up, down = layer.w1, layer.w3, layer.w2
    if not fuses(x, layer):
        first, second = project(x, [gate, up])
        (out,) = project(silu(first) * second, [down])
        return out
    from trainer.policy.kernels.gated_mlp import gated_mlp  # needs Triton, absent on a CPU

    flat = x.flatten(0, 1)
    low = linear(flat, torch.cat([gate.lora_a.weight, up.lora_a.weight]).to(x.dtype))
    gate_b, up_b = (scaled_b(one).t().contiguous() for one in (gate, up))
    down_a, down_b = down.lora_a.weight, scaled_b(down).to(x.dtype)
    frozen_weights = joined_of(gate), weight_of(down)
    return gated_mlp(flat, *frozen_weights, low, gate_b, up_b, down_a, down_b).view(x.shape)


def normed(x: Tensor, norm: Any) -> Tensor:
    """RMS norm as the plain formula, in fp32: the compiler fuses its passes."""
    return rms_norm(x.float(), norm.normalized_shape, norm.scale, norm.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [B, T, H, E] as the plain formula, which the compiler fuses."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def has_lora(one: Linear) -> bool:
    return bool(hasattr(one, "lora_a") and not one.disabled)


def scaled_b(one: Linear) -> Tensor:
    scaled: Tensor = one.lora_b.weight * (one.alpha / one.rank)
    return scaled


def project(x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """Apply each of `linears` to x, in one multiplication if their weights are joined."""
    joined = len(linears) > 1 and hasattr(linears[0], "joined_weight")
    if not joined and len(linears) > 1:
        return [project(x, [one])[0] for one in linears]
    weight = joined_of(linears[0]) if joined else weight_of(linears[0])
    base, lora = products(x, weight, linears)
    out = base if lora is None else base + lora
    return torch.split(out, [outputs_of(one) for one in linears], dim=-1)


Weight = tuple[Tensor | Fp8Weight, Tensor | None]


def weight_of(one: Linear) -> Weight:
    quantised: Weight | None = getattr(one, "quantised", None)
    return quantised or (one.weight, one.bias)


def joined_of(first: Linear) -> Weight:
    return first.joined_weight, first.joined_bias


def outputs_of(one: Linear) -> int:
    outputs: int = one.out_dim if hasattr(one, "lora_a") else one.out_features
    return outputs


def frozen(x: Tensor, weight: Weight) -> Tensor:
    """The product of x with a frozen weight, which may be stored in fp8."""
    values, bias = weight
    if isinstance(values, Tensor):
        return linear(x, values, bias)
    out = fp8_linear(x, values)
    return out if bias is None else out + bias


def products(x: Tensor, weight: Weight, linears: Sequence[Linear]) -> tuple[Tensor, Tensor | None]:
    """The products of x with the joined frozen weights of `linears` and with their LoRAs."""
    if not any(map(has_lora, linears)):
        return frozen(x, weight), None
    # Add the bias in whichever product takes it without a separate pass.
    values, bias = weight
    fp8 = not isinstance(values, Tensor)
    base = frozen(x, (values, None if fp8 else bias))
    downs = [one.lora_a.weight for one in linears if has_lora(one)]
    ups = [
        scaled_b(one) if has_lora(one) else base.new_zeros(outputs_of(one), 0) for one in linears
    ]
    low = linear(x, torch.cat(downs).to(x.dtype))
    # One product with the B matrices on the diagonal, so that its gradient stays in one piece.
    # No `addmm`: the compiler fuses the sum with the operation that follows.
    up: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
    return base, linear(low, up.to(x.dtype), bias if fp8 else None)


def join_frozen(layer: Any, *, fp8: bool = False) -> None:
    """Store frozen weights that multiply the same input side by side. Trained ones stay apart.

    With `fp8` the stored weights are quantised, and the modules keep views of them.
    """
    for linears in joined_linears(layer):
        if any(one.weight.requires_grad for one in linears):
            continue
        weight, bias = joined(linears)
        values: Tensor | Fp8Weight = weight
        if fp8:
            values = quantised_weight(weight)
            weight = values.rows
        linears[0].joined_weight, linears[0].joined_bias = values, bias
        at = 0
        for one in linears:
            one.weight = nn.Parameter(weight[at : at + len(one.weight)], requires_grad=False)
            at += len(one.weight)
    for one in (layer.attn.output_proj, layer.mlp.w2):
        if fp8:
            values = quantised_weight(one.weight.detach())
            one.quantised = (values, one.bias)
            one.weight = nn.Parameter(values.rows, requires_grad=False)


def join_parameters(layer: Any) -> None:
    """Replace the parameters of layers that multiply the same input by joined ones.

    This is `join_frozen` for weights that FSDP shards: it gathers parameters, but no views of them.
    `part_joined` gives plain layers their parts.
    """
    for linears in joined_linears(layer):
        weight, bias = joined(linears)
        for one in linears:
            del one.weight
            if bias is not None:
                del one.bias
        linears[0].joined_weight = nn.Parameter(weight, requires_grad=False)
        linears[0].joined_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


def part_joined(layer: Any, *_: Any) -> None:
    """Give each plain layer its part of the joined parameters. A hook before a layer's `forward`.

    FSDP registers the gathered parameters just before, and the sharded ones afterwards.
    """
    for linears in joined_linears(layer):
        weight, bias = joined_of(linears[0])
        assert isinstance(weight, Tensor)
        sizes = [outputs_of(one) for one in linears]
        for one, part in zip(linears, torch.split(weight, sizes), strict=True):
            one.weight = part
        if bias is not None:
            for one, part in zip(linears, torch.split(bias, sizes), strict=True):
                one.bias = part


def joined_linears(layer: Any) -> list[list[Linear]]:
    return [[layer.get_submodule(name) for name in names] for names in JOINED]


def joined(linears: Sequence[Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of `linears` in one tensor, and their biases in another."""
    weight = torch.cat([one.weight.detach() for one in linears])
    biases = [one.bias for one in linears]
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
