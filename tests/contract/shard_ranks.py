"""One of several processes that hold a policy together. Prints what it found as JSON.

`test_shards.py` starts all of them: `python shard_ranks.py values|gradients MODEL`.
"""

import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.config import LoraConfig
from trainer.learner.gradient import row_logprobs
from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.compiled import CompiledLayers
from trainer.policy.compiled_layer import part_joined
from trainer.policy.model import Policy, load_model, lora_state

# Layers with and without a LoRA share a joined product.
LORA = LoraConfig(rank=2, alpha=4, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
CPU = torch.device("cpu")
Form = Literal["plain", "compiled"]


def values(model: Path) -> dict[str, Any]:
    """Bytes of frozen weights here and in all, and what differs from the whole model."""
    found: dict[str, Any] = {}
    forms: tuple[Form, ...] = ("plain", "compiled")
    for form in forms:
        whole = load_model(model, lora=LORA, dtype=torch.bfloat16, device=CPU)
        policy = load_model(model, lora=LORA, dtype=torch.bfloat16, device=CPU, sharded_for=form)
        frozen = {name: one for name, one in policy.named_parameters() if ".lora_" not in name}
        held = sum(local(one).nbytes for one in frozen.values())
        total = sum(one.numel() * one.element_size() for one in frozen.values())
        expected = dict(whole.named_parameters())
        if form == "compiled":
            for layer in policy.layers:
                layer.unshard()  # this and the next are what hooks do before a layer runs
                part_joined(layer)
        tensors = {name: gathered(policy, name) for name in expected}
        differ = [name for name, one in expected.items() if not same(tensors[name], one)]
        found[form] = {"held": held, "total": total, "differ": differ, "compared": len(tensors)}
    return found


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gathered(policy: Policy, name: str) -> Tensor:
    module, _, kind = name.rpartition(".")
    found = getattr(policy.get_submodule(module), kind)
    return found.full_tensor() if isinstance(found, DTensor) else found


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def gradients(model: Path) -> dict[str, Any]:
    """The largest relative error of each form's logprobs and gradients, and what backward keeps."""
    row = forked_row()
    exact = results(load(model, None), row)
    errors: dict[str, float] = {}
    policy = load(model, "compiled")
    errors["plain layers with joined weights"] = worst(results(policy, row), exact)
    policy.compiled = CompiledLayers(
        policy.layers, policy.architecture, backend="aot_eager", sharded=True
    )
    for recompute in (False, True):
        policy.activation_checkpointing = recompute
        errors[f"compiled, recompute={recompute}"] = worst(results(policy, row), exact)
    off = float((exact["without LoRA"] - exact["with LoRA"]).abs().max())
    return {
        "errors": errors,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "effect of the LoRA": off,
        **weights_for_backward(policy, row),
    }


def weights_for_backward(policy: Policy, row: Row) -> dict[str, int]:
    """How many frozen weights the backward pass will use: gathered again, or kept until then."""
    policy.activation_checkpointing = False
    frozen = [one for name, one in policy.layers.named_parameters() if ".lora_" not in name]
    shapes = {tuple(one.shape) for one in frozen if one.dim() == 2}
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        row_logprobs(policy, row)
    weights = [one for one in saved if {tuple(one.shape), tuple(one.shape[::-1])} & shapes]
    kept = [one for one in weights if one.untyped_storage().nbytes()]
    return {"gathered again": len(weights) - len(kept), "kept": len(kept)}


def load(model: Path, form: Form | None) -> Policy:
    policy = load_model(model, lora=LORA, dtype=torch.float32, device=CPU, sharded_for=form)
    generator = torch.Generator().manual_seed(0)
    for tensor in lora_state(policy).values():
        tensor.normal_(std=0.05, generator=generator)
    return policy


def forked_row() -> Row:
    chance = random.Random(0)
    prompt = [chance.randrange(200) for _ in range(40)]
    samples = []
    for member in range(4):
        own = [chance.randrange(200) for _ in range(chance.randint(5, 30))]
        mask = [False] * len(prompt) + [True] * len(own)
        ids = prompt + own
        samples.append(Sample(ids, mask, [0.0] * len(ids), 1.0, 1.0, 0, member))
    (row,) = pack(samples, length=512)
    return row


def results(policy: Policy, row: Row) -> dict[str, Tensor]:
    logprobs, _ = row_logprobs(policy, row)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).mean().backward()  # type: ignore[no-untyped-call]
    found = {"logprobs": logprobs.detach()}
    for name, parameter in policy.trainable().items():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    with torch.no_grad():
        policy.set_lora_enabled(False)
        found["without LoRA"] = row_logprobs(policy, row)[0]
        policy.set_lora_enabled(True)
        found["with LoRA"] = row_logprobs(policy, row)[0]
    return found


def worst(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # tracing imports modules of torch that warn
    dist.init_process_group("gloo")
    work = {"values": values, "gradients": gradients}[sys.argv[1]]
    sys.stdout.write(json.dumps(work(Path(sys.argv[2]))) + "\n")
    dist.destroy_process_group()
