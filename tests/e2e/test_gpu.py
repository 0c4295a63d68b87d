"""The learner on a CUDA GPU: packed, shared and compiled rows give the results of each sequence.

Bounds are relative to bf16: the error compared with fp32 may exceed that of plain bf16 layers, on
each sequence alone, by at most half.
"""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.loading import write_model
from trainer.base_model.architecture import parse_architecture
from trainer.config import LoraConfig
from trainer.learner.gradient import row_logprobs
from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.attention import inverse_frequencies
from trainer.policy.compiled import CompiledLayers
from trainer.policy.model import Policy, assemble, init_lora, load_model

logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # torch.compile emits deprecation warnings about torch itself.
    pytest.mark.filterwarnings("ignore"),
]
SHAPE = {
    "vocab_size": 20_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Heads of 128 use FlashAttention 4 where it is installed; others use flex attention.
HEADS = {"llama": 128, "qwen2": 128, "qwen3": 64}
Gradients = dict[str, Tensor]


def policy_of(family: str, dtype: torch.dtype, *, compiled: bool, fp8: bool = False) -> Policy:
    """A policy with the same random weights in any dtype."""
    device = torch.device("cuda")
    lora = LoraConfig(rank=8)
    shape = {**SHAPE, "head_dim": HEADS[family]}
    architecture = parse_architecture({"model_type": family, **shape})
    torch.manual_seed(0)
    policy = assemble(architecture, lora)
    policy.architecture, policy.lora = architecture, lora
    policy.frequencies = inverse_frequencies(architecture.rope, architecture.head_dim, device)
    for name, parameter in policy.named_parameters():
        parameter.data = parameter.data.to(
            device, torch.float32 if name.endswith(".scale") else dtype
        )
    policy.tok_embeddings.weight.data *= 0.05  # for logits as in a real model, not of N(0, 512)
    policy.requires_grad_(False)
    init_lora(policy, 0, device=device)
    for name, parameter in policy.trainable().items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=torch.Generator("cuda").manual_seed(1))
    if compiled:
        policy.compiled = CompiledLayers(policy.layers, policy.architecture, fp8=fp8)
    return policy


def samples_of(seed: int, *, groups: int = 3, size: int = 6, longest: int = 120) -> list[Sample]:
    chance = random.Random(seed)
    found = []
    for group in range(groups):
        prompt = [chance.randrange(20_000) for _ in range(chance.randint(20, longest))]
        # Half of a group forks a second time, as in a conversation of several turns.
        turn = [chance.randrange(20_000) for _ in range(30)]
        for member in range(size):
            before = prompt + turn * (member % 2)
            own = [chance.randrange(20_000) for _ in range(chance.randint(5, longest))]
            ids = before + own
            mask = [False] * len(before) + [True] * len(own)
            found.append(Sample(ids, mask, [0.0] * len(ids), 1.0, 1.0, group, len(found)))
    return found


def logprobs_and_gradients(policy: Policy, rows: list[Row]) -> tuple[dict[int, Tensor], Gradients]:
    """Logprobs by the target's number in all samples, and the gradients of a weighted sum."""
    parameters = policy.trainable()
    for parameter in parameters.values():
        parameter.grad = None
    found: dict[int, Tensor] = {}
    for row in rows:
        row = row.to(torch.device("cuda"))
        logprobs = of_row(policy, row)
        (logprobs * row.advantages).sum().backward()
        for key, value in zip(row.sampler_logprobs.tolist(), logprobs.detach(), strict=True):
            found[int(key)] = value
    return found, {name: parameter.grad.clone() for name, parameter in parameters.items()}


def of_row(policy: Policy, row: Row) -> Tensor:
    """Logprobs of a row. Plain policies, the reference, use no kernels and a full mask."""
    if policy.compiled:
        return row_logprobs(policy, row)[0]
    places = {"positions": row.positions[None], "predictors": row.predictors}
    mask = row.mask()[None]
    return policy.logprobs(row.tokens[None], mask=mask, targets=row.targets, **places)[0]


def named(samples: list[Sample]) -> list[Sample]:
    """Number the tokens in `logprobs`, so that they can be identified after packing."""
    at = 0
    for sample in samples:
        sample.logprobs = [float(at + index) for index in range(len(sample.ids))]
        sample.advantage = 1.0 if sample.trajectory % 2 else -0.5
        at += len(sample.ids)
    return samples


def errors(
    found: tuple[dict[int, Tensor], Gradients], exact: tuple[dict[int, Tensor], Gradients]
) -> tuple[float, float, float]:
    """Mean and largest error of the logprobs, and the relative error of all gradients together."""
    assert found[0].keys() == exact[0].keys()
    gaps = torch.stack([(found[0][key] - exact[0][key]).abs() for key in exact[0]])
    off = sum((found[1][n] - exact[1][n]).norm() ** 2 for n in exact[1]) ** 0.5
    size = sum(exact[1][n].norm() ** 2 for n in exact[1]) ** 0.5
    return gaps.mean().item(), gaps.max().item(), float(off / size)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_shared_and_compiled_is_as_exact_as_each_sequence_alone(
    family: str, recompute: bool
) -> None:
    samples = named(samples_of(0))
    alone = [row for sample in samples for row in pack([sample], length=512)]
    packed = pack(samples, length=2048)
    assert len(packed) < len(alone) and packed[0].unshared > len(packed[0].tokens)
    exact = logprobs_and_gradients(policy_of(family, torch.float32, compiled=False), alone)
    plain = logprobs_and_gradients(policy_of(family, torch.bfloat16, compiled=False), alone)
    compiled = policy_of(family, torch.bfloat16, compiled=True)
    compiled.activation_checkpointing = recompute
    ours = errors(logprobs_and_gradients(compiled, packed), exact)
    theirs = errors(plain, exact)
    logger.info("%s recompute=%s: ours %s, plain bf16 %s", family, recompute, ours, theirs)
    assert all(mine <= 1.5 * other for mine, other in zip(ours, theirs, strict=True))


def test_the_error_of_fp8_is_that_of_its_rounding() -> None:
    samples = named(samples_of(2))
    alone = [row for sample in samples for row in pack([sample], length=512)]
    packed = pack(samples, length=2048)
    exact = logprobs_and_gradients(policy_of("qwen2", torch.float32, compiled=False), alone)
    fp8 = policy_of("qwen2", torch.bfloat16, compiled=True, fp8=True)
    mean, greatest, gradient = errors(logprobs_and_gradients(fp8, packed), exact)
    logger.info("fp8: mean %s, greatest %s, gradient %s", mean, greatest, gradient)
    # With three bits of mantissa a product is off by 2.7 %, and a layer has seven products.
    assert mean < 0.1 and gradient < 0.15


def test_compiled_fp32_layers_equal_plain_ones_up_to_rounding() -> None:
    samples = named(samples_of(1))
    packed = pack(samples, length=2048)
    exact = logprobs_and_gradients(policy_of("qwen3", torch.float32, compiled=False), packed)
    compiled = logprobs_and_gradients(policy_of("qwen3", torch.float32, compiled=True), packed)
    mean, greatest, gradient = errors(compiled, exact)
    logger.info("fp32: mean %s, greatest %s, gradient %s", mean, greatest, gradient)
    assert greatest < 2e-3 and gradient < 2e-3  # flex attention computes products in tf32


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """FSDP shards and gathers in one process as in several, on one GPU."""
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("world_of_one")
def test_compiled_layers_of_a_sharded_policy_compute_as_those_of_a_whole_one(
    tmp_path: Path, family: str, recompute: bool
) -> None:
    shape = {"model_type": family, **SHAPE, "head_dim": HEADS[family]}
    write_model(tmp_path / "model", shape)
    packed = pack(named(samples_of(3)), length=2048)
    forms: tuple[Literal["compiled"] | None, ...] = (None, "compiled")
    found = []
    for form in forms:
        policy = load_model(
            tmp_path / "model",
            lora=LoraConfig(rank=8),
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            sharded_for=form,
        )
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05, generator=torch.Generator("cuda").manual_seed(1))
        policy.compiled = CompiledLayers(
            policy.layers, policy.architecture, sharded=form is not None
        )
        policy.activation_checkpointing = recompute
        found.append(logprobs_and_gradients(policy, packed))
    mean, greatest, gradient = errors(found[1], found[0])
    logger.info("%s sharded: mean %s, greatest %s, gradient %s", family, mean, greatest, gradient)
    assert greatest < 1e-3 and gradient < 1e-3  # the same kernels; sums may differ in their order


def test_nothing_is_compiled_after_the_third_step_of_varying_lengths() -> None:
    from torch._dynamo.utils import counters

    policy = policy_of("qwen2", torch.bfloat16, compiled=True)
    graphs = []
    for step in range(10):
        chance = random.Random(step)
        samples = named(
            samples_of(
                step,
                groups=chance.randint(2, 9),
                size=chance.randint(2, 12),
                longest=chance.randint(40, 400),
            )
        )
        logprobs_and_gradients(policy, pack(samples, length=4096))
        graphs.append(counters["stats"]["unique_graphs"])
    logger.info("graphs after each step: %s", graphs)
    assert graphs[-1] == graphs[2]
