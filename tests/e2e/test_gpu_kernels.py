"""Each kernel on a CUDA GPU computes its plain formula and the formula's gradients."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.attention import attend
from trainer.policy.compiled_layer import LARGEST_RANK, rotate, row_mask
from trainer.policy.kernels import tree_attention
from trainer.policy.tree_mask import tree_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]


def draw(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.randn(*shape, device="cuda", generator=generator) * scale
    return drawn.to(dtype).requires_grad_()


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("rank", [4, 8, 16, 32, LARGEST_RANK])
def test_swiglu_between_loras_computes_the_formula(rank: int) -> None:
    from trainer.policy.kernels.lora_swiglu import lora_swiglu, lora_swiglu_backward

    tokens, inner = 300, 1000  # not multiples of a tile
    gate_up, low = draw(tokens, 2 * inner, seed=1), draw(tokens, 2 * rank, seed=2)
    weights = [draw(rank, inner, seed=it, scale=0.1, dtype=torch.float32) for it in (3, 4, 5)]
    given = (gate_up, low, *weights)
    found = lora_swiglu(*given, peaks=True)
    wide = [it.detach().double().requires_grad_() for it in given]
    gate = wide[0][:, :inner] + wide[1][:, :rank] @ wide[2]
    up = wide[0][:, inner:] + wide[1][:, rank:] @ wide[3]
    exact = silu(gate) * up
    exact_low = exact @ wide[4].t()
    assert off(found[0], exact) < 4e-3 and off(found[1], exact_low) < 8e-3
    assert torch.equal(found[2][0], found[0].detach().float().abs().amax(dim=1))
    factors = torch.maximum(silu(gate).abs(), up.abs()).amax(dim=1)
    assert off(found[2][1], factors) < 4e-3
    slopes = draw(tokens, inner, seed=6), draw(tokens, rank, seed=7)
    mine = torch.autograd.grad(found[:2], given, slopes)
    theirs = torch.autograd.grad((exact, exact_low), wide, [it.double() for it in slopes])
    for name, a, b in zip(("gate_up", "low", "gate", "up", "down"), mine, theirs, strict=True):
        assert off(a, b) < 8e-3, name
    detached = [it.detach() for it in (*given, *slopes)]
    scales = mine[0].float().abs().amax(dim=1) / 50  # fp8 reaches up to 448
    rounded = lora_swiglu_backward(*detached, scales)[0]
    assert off(rounded.float() * scales[:, None], mine[0]) < 3e-2


@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_split_and_rotated_in_both_directions(norm: bool) -> None:
    from trainer.policy.kernels.split_heads import split_heads

    tokens, heads, kv_heads, size = 77, 6, 2, 64
    base, lora = (draw(tokens, (heads + 2 * kv_heads) * size, seed=it) for it in (1, 2))
    angles = torch.randn(tokens, size // 2, device="cuda").repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    scales = [draw(size, seed=it, dtype=torch.float32).detach() for it in (3, 4)]
    eps = 0.1  # large enough to be seen in the results
    norms = (*scales, eps) if norm else ()
    *found, raw = split_heads(base, lora, cos, sin, heads, kv_heads, *norms)
    assert raw.shape == (tokens, heads + kv_heads if norm else 0, size)
    wide = [it.detach().double().requires_grad_() for it in (base, lora)]
    joined = (wide[0] + wide[1]).view(tokens, -1, size)
    q, k, v = joined.split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        q, k = (
            rms_norm(it, (size,), scale.double(), eps)
            for it, scale in zip((q, k), scales, strict=True)
        )
    turn = cos.double()[:, None], sin.double()[:, None]
    exact = rotate(q, *turn), rotate(k, *turn), v
    slopes = [draw(*it.shape, seed=9) for it in found]
    for a, b in zip(found, exact, strict=True):
        assert off(a, b) < 4e-3
    mine = torch.autograd.grad(found, (base, lora), slopes)
    for a, b in zip(
        mine, torch.autograd.grad(exact, wide, [it.double() for it in slopes]), strict=True
    ):
        assert off(a, b) < 4e-3


def sequences(kind: str) -> list[tuple[int, list[int]]]:
    """Sequences with their groups. The name of the kind says how they share prefixes."""
    chance = random.Random(0)

    def some(least: int, most: int) -> list[int]:
        return [chance.randrange(9, 99) for _ in range(chance.randint(least, most))]

    if kind == "one":
        return [(0, some(512, 512))]
    if kind == "separate":
        return [(member, [1 + member, *some(1, 500)]) for member in range(9)]
    if kind == "few keys":  # two trees with short prompts, and a sequence alone
        prompts = some(36, 36), some(150, 150)
        shared = [(member % 2, [*prompts[member % 2], *some(150, 400)]) for member in range(12)]
        return [*shared, (2, some(300, 300))]
    if kind == "nested":
        first, second = some(200, 200), some(130, 130)
        deep = [(0, [*first, *second, *some(1, 300)]) for _ in range(4)]
        longest = [*deep[0][1], *some(100, 100)]  # goes on from another sequence
        return [*deep, (0, longest), *((0, [*first, *some(128, 256)]) for _ in range(6))]
    return [(0, [*prompt, *some(20, 200)]) for prompt in [some(333, 333)] * 40]


@pytest.mark.parametrize("length", [6144, 8192])
@pytest.mark.parametrize("kind", ["one", "separate", "few keys", "nested", "many keys"])
def test_flash_attention_follows_the_tree(kind: str, length: int) -> None:
    if not tree_attention.available(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and FlashAttention 4")
    samples = [
        Sample([*ids, 0], [True] * (len(ids) + 1), [0.0] * (len(ids) + 1), 1.0, 1.0, group, number)
        for number, (group, ids) in enumerate(sequences(kind))
    ]
    (row,) = pack(samples, length=length)
    assert bool(row.separate) == (kind in ("one", "separate"))
    row = row.to(torch.device("cuda"))
    check_attention(row, length, masked=kind == "many keys", copies=not row.separate)
    if kind == "one":
        check_attention(row, len(row.tokens), masked=False, copies=False)  # without padding


def check_attention(row: Row, length: int, *, masked: bool, copies: bool) -> None:
    tokens = len(row.tokens)
    tree = tree_mask(row.ends, length, device=row.tokens.device)
    segments, keys = tree.paths.counts.tolist()
    assert (segments == 0) == masked and (keys > length) == (copies and not masked)
    mask = row_mask(tree, torch.bfloat16, 128).mask
    given = [draw(1, length, heads, 128, seed=heads) for heads in (8, 2)]
    given.append(draw(1, length, 2, 128, seed=5))
    out = tree_attention.tree_attention(*given, *mask)[0][:, :tokens]
    wide = [it.detach()[:, :tokens].float().requires_grad_() for it in given]
    exact = attend(*(it.transpose(1, 2) for it in wide), row.mask()[None]).transpose(1, 2)
    assert off(out, exact) < 8e-3
    slope = draw(*exact.shape, seed=8)
    mine = torch.autograd.grad(out, given, slope)
    theirs = torch.autograd.grad(exact, wide, slope.float())
    for a, b in zip(mine, theirs, strict=True):
        assert off(a[:, :tokens], b) < 1.5e-2
        assert not a[:, tokens:].any()  # padding has no gradient
