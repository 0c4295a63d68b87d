"""Samples tokens from logits, and computes logprobs, with one pass over the vocabulary each.

vLLM draws random numbers for every word (the Gumbel trick). Here a token needs two: one selects a
part of the vocabulary by the parts' sums, and one a word of it. B requests, V words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 8192  # words
PARTS = tl.constexpr(64)  # at most


@triton.jit
def _sums(logits, tops, sums, stride, words, parts, PART: tl.constexpr):
    """The largest logit of each part, and the sum of exp(logit - largest)."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    place = logits + row.to(tl.int64) * stride + at
    x = tl.load(place, mask=at < words, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(x - shift), 0))


@triton.jit
def _weights_of_parts(tops, sums, row, parts):
    """The largest logit of a row, and the sum of exp(logit - largest) for each part [PARTS]."""
    p = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + p, mask=p < parts, other=float("-inf"))
    total = tl.load(sums + row * parts + p, mask=p < parts, other=0.0)
    largest = tl.max(top, 0)
    return largest, tl.where(total == 0, 0.0, total * tl.exp(top - largest))


@triton.jit
def _first_beyond(weights, share, numbers, none):
    """The first place at which the running sum of the weights exceeds its share of the total."""
    running = tl.cumsum(weights, 0)
    target = tl.max(running, 0) * share
    # Sums in parallel are not quite monotonic, so weights of zero are excluded by name.
    last = tl.max(tl.where(weights > 0, numbers, 0), 0)
    return tl.minimum(tl.min(tl.where((running > target) & (weights > 0), numbers, none), 0), last)


@triton.jit
def _draw(
    logits, tops, sums, out, requests, temperatures, seeds, positions, stride, words, parts,
    PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request = tl.load(requests + row).to(tl.int64)
    seed, position = tl.load(seeds + request), tl.load(positions + row)
    temperature = tl.load(temperatures + request).to(tl.float32)
    first, second, _, _ = tl.randint4x(seed, position.to(tl.int32))
    scale = 1.0 / (1 << 24)  # the upper 24 bits, as a float holds no more: always below one
    first_share = (first.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * scale
    second_share = (second.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * scale

    p = tl.arange(0, PARTS)
    largest, weights = _weights_of_parts(tops, sums, row, parts)
    if temperature == 0:
        top = tl.load(tops + row * parts + p, mask=p < parts, other=float("-inf"))
        part = tl.min(tl.where(top == largest, p, parts - 1), 0)
    else:
        part = tl.minimum(_first_beyond(weights, first_share, p, parts - 1), parts - 1)
    n = tl.arange(0, PART)
    at = part * PART + n
    place = logits + row.to(tl.int64) * stride + at
    x = tl.load(place, mask=at < words, other=float("-inf")).to(tl.float32)
    most = tl.max(x, 0)
    if temperature == 0:
        word = tl.min(tl.where(x == most, n, PART - 1), 0)
    else:
        word = _first_beyond(tl.exp(x - most), second_share, n, PART - 1)
    tl.store(out + row, tl.minimum(part * PART + word, words - 1).to(tl.int64))


@triton.jit
def _logprobs(logits, tops, sums, tokens, out, stride, count, parts, COUNT: tl.constexpr):
    row = tl.program_id(0)
    largest, weights = _weights_of_parts(tops, sums, row, parts)
    total = tl.log(tl.sum(weights, 0))
    for start in range(0, count, COUNT):
        at = start + tl.arange(0, COUNT)
        token = tl.load(tokens + row * count + at, mask=at < count, other=0)
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=at < count).to(tl.float32)
        tl.store(out + row * count + at, x - largest - total, mask=at < count)


def _parts(logits: Tensor) -> tuple[Tensor, Tensor, int]:
    count, words = logits.shape
    parts = triton.cdiv(words, PART)
    tops, sums = (logits.new_empty(count, parts, dtype=torch.float32) for _ in range(2))
    _sums[count, parts](logits, tops, sums, logits.stride(0), words, parts, PART=PART, num_warps=8)
    return tops, sums, parts


def fits(logits: Tensor) -> bool:
    """Whether the kernels can read these logits."""
    return bool(logits.stride(1) == 1 and logits.shape[1] <= PART * PARTS.value)


def sample(
    logits: Tensor,  # [B, V] divided by the temperature
    requests: Tensor,  # [B] number of the request in the tensors of all requests
    temperatures: Tensor,  # [all requests]; zero takes the likeliest word
    seeds: Tensor,  # [all requests]
    positions: Tensor,  # [B] the same seed gives another token at another position
) -> Tensor:
    """Return a token for each row [B]."""
    tops, sums, parts = _parts(logits)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    given = (requests, temperatures, seeds, positions, logits.stride(0), logits.shape[1], parts)
    _draw[len(logits),](logits, tops, sums, out, *given, PART=PART, num_warps=8)
    return out


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logprobs of tokens [B, N] as [B, N]."""
    tops, sums, parts = _parts(logits)
    tokens = tokens.to(torch.int64).contiguous()
    out = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    count = tokens.shape[1]
    wide = min(1024, triton.next_power_of_2(count))
    given = (tokens, out, logits.stride(0), count, parts)
    _logprobs[len(logits),](logits, tops, sums, *given, COUNT=wide, num_warps=4)
    return out
