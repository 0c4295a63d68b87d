"""Prints the errors of the GPU kernels relative to their plain formulas, as JSON: `name -> error`.

`test_kernels.py` runs it with Triton's interpreter, in an environment that has Triton. In fp32 only
the order of sums makes a difference.
"""

import itertools
import json
import sys

import torch
from torch import Tensor
from torch.nn.functional import silu

import trainer.policy.kernels.fp8 as fp8
from trainer.engines.in_vllm import decode_kernel, lora_kernel, sampling_kernel
from trainer.policy.kernels import gated_mlp, lora_swiglu
from trainer.policy.kernels.copied_keys import copied, summed
from trainer.policy.kernels.split_heads import split_heads
from trainer.policy.tree_paths import tree_paths

TOKENS, DIM, INNER, RANK = 70, 48, 208, 4


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).requires_grad_()


def off(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * scale


def heads(*, norm: bool) -> dict[str, float]:
    count, kv_count, size = 6, 2, 16
    base, lora = (draw(TOKENS, (count + 2 * kv_count) * size) for _ in range(2))
    angles = torch.randn(TOKENS, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    eps = 0.1  # large enough to be seen in the results
    norms = (torch.randn(size), torch.randn(size), eps) if norm else ()
    *found, raw = split_heads(base, lora, cos, sin, count, kv_count, *norms)
    q, k, v = (base + lora).view(TOKENS, -1, size).split([count, kv_count, kv_count], dim=1)
    if norm:
        assert torch.equal(raw, torch.cat([q, k], dim=1))
        q, k = normed(q, norms[0], eps), normed(k, norms[1], eps)
    exact = turned(q, cos, sin), turned(k, cos, sin), v
    slopes = [torch.randn_like(it) for it in exact]
    mine = torch.autograd.grad(found, (base, lora), slopes)
    theirs = torch.autograd.grad(exact, (base, lora), slopes)
    errors = [off(a, b) for a, b in zip((*found, *mine), (*exact, *theirs), strict=True)]
    name = "normed heads" if norm else "heads"
    return {f"{name} {number}": error for number, error in enumerate(errors)}


def copies() -> dict[str, float]:
    """Keys and values on the paths of a tree with two forks, and the sums of their gradients."""
    ends = [30] * 9 + [24] * 10 + [22] * 3 + [24] * 2 + [30] * 6
    tree = tree_paths(ends, 64)
    total = int(tree.counts[1])
    tokens = tree.tokens[:total]
    assert sorted(set(tokens.bincount().tolist())) == [1, 3, 5]
    given = draw(64, 3, 16), draw(64, 3, 16)  # not a power of two
    found = copied(*given, tokens)
    exact = [it[tokens.long()] for it in given]
    slopes = [torch.randn_like(it) for it in exact]
    mine = summed(*slopes, tree.copies[:total], tree.offsets)
    theirs = torch.autograd.grad(exact, given, slopes)
    errors = [off(a, b) for a, b in zip((*found, *mine), (*exact, *theirs), strict=True)]
    return {f"copies {number}": error for number, error in enumerate(errors)}


def mlp() -> dict[str, float]:
    """The whole MLP with frozen weights in fp32, and in fp8 with an emulated product."""
    lora_swiglu.CHUNKS = {"forward": 2, "backward": 2}
    x, a = draw(TOKENS, DIM), draw(2 * RANK, DIM, scale=0.1)
    gate_b, up_b, down_a = (draw(RANK, INNER, scale=0.2) for _ in range(3))
    down_b = draw(DIM, RANK, scale=0.2)
    first, second = torch.randn(2 * INNER, DIM) / 7, torch.randn(DIM, INNER) / 14
    biases = torch.randn(2 * INNER) / 10, torch.randn(DIM) / 10
    given = (x, a, gate_b, up_b, down_a, down_b)
    gate_up = x @ first.t() + biases[0]
    gate = gate_up[:, :INNER] + x @ a[:RANK].t() @ gate_b
    up = gate_up[:, INNER:] + x @ a[RANK:].t() @ up_b
    inner = silu(gate) * up
    exact = inner @ second.t() + biases[1] + inner @ down_a.t() @ down_b.t()
    slope = torch.randn_like(exact)
    theirs = torch.autograd.grad(exact, given, slope, retain_graph=True)
    errors = {}
    for name, held in (("", lambda weight: weight), ("fp8 ", fp8.quantised_weight)):
        weights = (held(first), biases[0]), (held(second), biases[1])
        out = gated_mlp.gated_mlp(x, *weights, x @ a.t(), gate_b, up_b, down_a, down_b)
        mine = torch.autograd.grad(out, given, slope)
        pairs = zip((out, *mine), (exact, *theirs), strict=True)
        errors |= {f"{name}mlp {number}": off(a, b) for number, (a, b) in enumerate(pairs)}
    return errors


def decoding() -> dict[str, float]:
    """Attention over vLLM's pages, for requests in one segment and in several."""
    errors = {}
    decode_kernel.SHORTEST, decode_kernel.PROGRAMS = 64, 1
    lengths, heads, kv_heads, size, page = [5, 170, 33, 0], 14, 2, 64, 16
    table = torch.randperm(4 * 11).int().view(4, 11)
    one = torch.ones(1)
    for kind, segments in itertools.product((torch.float16, torch.float8_e4m3fn), (1, 3)):
        decode_kernel.SEGMENTS = segments
        fp8 = kind == torch.float8_e4m3fn
        stored = torch.randn(4 * 11, page, kv_heads, 2 * size).to(kind)
        cache = stored.transpose(1, 2).view(torch.uint8) if fp8 else stored.transpose(1, 2)
        q = torch.randn(4, heads, size).to(kind)
        scales = (one / 4, one / 2, one * 2) if fp8 else (one, one, one)
        given = (table, torch.tensor(lengths, dtype=torch.int32), size**-0.5, scales, 170)
        found, exact = torch.full(q.shape, torch.nan), torch.zeros(q.shape)
        decode_kernel.attend(q, cache, found, *given)
        for number, length in enumerate(lengths):
            rows = stored.float()[table[number].long()].flatten(0, 1)[:length]
            both = rows.repeat_interleave(heads // kv_heads, dim=1).split(size, dim=-1)
            keys, values = both[0] * scales[1], both[1] * scales[2]
            scores = torch.einsum("hd,thd->ht", q[number].float() * scales[0], keys)
            weights = (scores * size**-0.5).softmax(-1)
            exact[number] = torch.einsum("ht,thd->hd", weights, values)
        errors[f"decoding {kind} {segments}"] = off(found, exact)
    return errors


def loras() -> dict[str, float]:
    """LoRAs of tokens that use one of two or none, for joined layers with one to three outputs."""
    errors = {}
    tokens, width, rank = 50, 300, 12
    for outputs in ([90], [200, 200], [300, 70, 70]):
        x, y = torch.randn(tokens, width), torch.randn(tokens, sum(outputs))
        a = [torch.randn(2, 1, rank, width) / width**0.5 for _ in outputs]
        b = [torch.randn(2, 1, count, rank) for count in outputs]
        mapping = torch.randint(-1, 2, (tokens,), dtype=torch.int32)
        mapping[:20] = 1  # a tile with a single LoRA
        exact = y.clone()
        for row, number in enumerate(mapping.tolist()):
            if number >= 0:
                parts = [(x[row] @ one[number, 0].T) for one in a]
                ups = (low @ one[number, 0].T for low, one in zip(parts, b, strict=True))
                exact[row] += 0.5 * torch.cat([*ups])
        order = mapping.sort(stable=True).indices.int()
        counts = mapping.unique(return_counts=True)[1].int()
        padding = torch.full([6], 2**30, dtype=torch.int32)  # of a graph that is larger
        batch = (torch.cat([it, padding]) for it in (mapping, order))
        y, x = (torch.cat([it, torch.full([6, it.shape[1]], 3.0)]) for it in (y, x))
        lora_kernel.add_lora(y, x, a, b, *batch, counts, 0.5)
        assert (y[tokens:] == 3).all()
        y = y[:tokens]
        errors[f"loras {len(outputs)}"] = off(y, exact)
    return errors


def sampling() -> dict[str, float]:
    """Logprobs, the likeliest word, and how far the words drawn are from their distribution."""
    sampling_kernel.PART = 16
    rows, words, impossible = 240, 24, 5
    logits = torch.randn(words).repeat(rows, 1)
    logits[:, impossible] = -torch.inf
    few, tokens = logits[:20], torch.randint(impossible + 1, words, (20, 3))
    found = sampling_kernel.logprobs(few, tokens)
    errors = {"logprobs": off(found, few.log_softmax(-1).gather(1, tokens))}
    broken = few.clone()
    broken[:, 20] = torch.nan
    assert sampling_kernel.logprobs(broken, tokens).isnan().all()
    requests, seeds = torch.arange(rows, dtype=torch.int32) % 8, torch.arange(8) * 77 + 2**40
    temperatures = torch.ones(8)
    temperatures[3] = 0
    given = (temperatures, seeds)
    positions = torch.arange(rows)
    drawn = sampling_kernel.sample(logits, requests, *given, positions)
    again = sampling_kernel.sample(few, requests[:20], *given, positions[:20])
    assert torch.equal(drawn[:20], again)
    assert (drawn[requests == 3] == logits[0].argmax()).all()
    counts = drawn[requests != 3].bincount(minlength=words).float()
    assert counts[impossible] == 0
    expected = counts.sum() * logits[0].softmax(-1)
    likely = expected > 0
    squares = (counts - expected)[likely].square() / expected[likely]
    # Chi-squared with 22 degrees of freedom: above 55 in one of 10,000 cases.
    errors["sampling is off by"] = float(squares.sum() > 55)
    return errors


def emulated(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, _: torch.dtype) -> Tensor:
    """A scaled fp8 product, which a CPU lacks. Inputs must neither overflow nor vanish in fp8."""
    assert not x.float().isnan().any() and (x.float().abs().amax() > 0.5)
    return (x.float() * x_scales) @ (weight.float() * scales.t()).t()


if __name__ == "__main__":
    torch.manual_seed(0)
    fp8.scaled_product = gated_mlp.scaled_product = emulated
    errors = {
        **heads(norm=False),
        **copies(),
        **mlp(),
        **heads(norm=True),
        **decoding(),
        **loras(),
        **sampling(),
    }
    sys.stdout.write(json.dumps(errors) + "\n")
