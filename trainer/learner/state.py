"""The state of a run: its policy, the trained weights, AdamW's moments and the generator.

A checkpoint stores the last three as safetensors files; nothing is ever unpickled.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kit.manifest import read_manifest
from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import CheckpointError, Unsupported
from trainer.learner.tensor_file import write_tensors
from trainer.learner.world import World
from trainer.policy.compiled import CompiledLayers
from trainer.policy.lora import fresh_lora
from trainer.policy.model import Policy, load_lora, load_model, peft_config
from trainer.step_config import GrpoConfig

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL = "model.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "optimizer.{}.safetensors"  # one per moment: as large as the weights, written at once
FP8_CAPABILITY = (8, 9)  # Ada and Hopper; an A100 has no fp8 products


class State:
    """A policy, its trained weights, their optimizer and the random generator."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.names = policy.trainable()
        self.parameters = list(self.names.values())
        # One kernel for all tensors: AdamW's default takes 7 ms more for a LoRA of a 4B model.
        cuda = self.parameters[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1.0, fused=cuda)
        self.generator = torch.Generator().manual_seed(seed)
        self._seed = seed

    def reset(self) -> "State":
        """Become the state of a new run: a fresh LoRA and an optimizer without history."""
        load_lora(self.policy, fresh_lora(self.policy, self._seed))
        self.optimizer.state.clear()
        self.generator.manual_seed(self._seed)
        return self

    def write(self, directory: Path, *, base_model: str) -> dict[str, str]:
        """Write a checkpoint's files into `directory`. Returns the sha256 of the large ones."""
        lora = self.policy.lora
        weights: dict[str, Tensor] = {name: it.detach() for name, it in self.names.items()}
        files = {ADAPTER if lora else FULL: weights, **self._optimizer_files()}
        with ThreadPoolExecutor(len(files)) as pool:  # write a file while the next is copied
            written = {
                name: pool.submit(write_tensors, on_cpu(tensors), directory / name)
                for name, tensors in files.items()
            }
        if lora is not None:
            config = json.dumps(peft_config(lora, base_model), indent=2)
            (directory / ADAPTER_CONFIG).write_text(config + "\n", encoding="utf-8")
        return {name: one.result() for name, one in written.items()}

    def read(self, directory: Path, world: World) -> None:
        """Load the checkpoint in `directory`, whose files have been verified."""
        if self.policy.lora is not None:
            load_lora(self.policy, world.tensors(lambda: read_tensors(directory / ADAPTER)))
        else:
            weights = world.tensors(lambda: read_tensors(directory / FULL))
            with torch.no_grad():
                for name, parameter in self.names.items():
                    parameter.copy_(weights[name])
        tensors = world.tensors(lambda: read_optimizer(directory))
        self.generator.set_state(tensors["generator"])
        self.optimizer.state.clear()
        for name, parameter in self.names.items():
            if f"step.{name}" in tensors:
                step = tensors[f"step.{name}"]
                self.optimizer.state[parameter] = {
                    "step": step.to(parameter.device) if parameter.is_cuda else step,
                    **{
                        moment: tensors[f"{moment}.{name}"].to(parameter.device)
                        for moment in MOMENTS
                    },
                }

    def _optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's files. The first also holds the step counts and the generator."""
        held = [(name, self.optimizer.state.get(it, {})) for name, it in self.names.items()]
        counts = {f"step.{name}": state["step"] for name, state in held if state}
        first, second = (
            {f"{moment}.{name}": state[moment].detach() for name, state in held if state}
            for moment in MOMENTS
        )
        first = {"generator": self.generator.get_state(), **counts, **first}
        return dict(zip(map(OPTIMIZER.format, MOMENTS), (first, second), strict=True))


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU. Copies from a GPU run all at once."""
    copies = {
        name: (tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(
            f"`{path}` cannot be read: {exc}", hint="Use the step before it, or pull it again"
        ) from exc


def read_optimizer(directory: Path) -> dict[str, Tensor]:
    """Read the optimizer's tensors from the files in the manifest."""
    manifest = read_manifest(directory) or {"files": {}}
    tensors: dict[str, Tensor] = {}
    for name in manifest["files"]:
        if fnmatch(name, "optimizer*.safetensors"):  # older checkpoints have a single one
            tensors |= read_tensors(directory / name)
    if "generator" not in tensors:
        raise CheckpointError(
            f"The checkpoint `{directory}` has no optimizer state",
            hint="Use the step before it, or pull it again",
        )
    return tensors


def lora_shape(lora: LoraConfig | None) -> dict[str, Any] | None:
    """The LoRA settings that must not change during a run. None trains every weight."""
    return lora.model_dump(mode="json", exclude={"seed"}) if lora else None


ORIGINAL = "Register the run under another name, or with its original settings"


def check_belongs(
    path: Path, *, base_model: str, lora: LoraConfig | None, hint: str = ORIGINAL
) -> None:
    """Raise unless the checkpoint at `path` is complete and has this base model and LoRA."""
    manifest = checkpoint.verify(path)
    for what, found, wanted in (
        ("base model", manifest.get("base_model"), base_model),
        ("LoRA", manifest.get("lora"), lora_shape(lora)),
    ):
        if found != wanted:
            raise CheckpointError(
                f"The checkpoint `{path}` has the {what} `{found}`, not `{wanted}`",
                hint=hint,
            )


def check_reference(
    config: GrpoConfig, checkpoints: Path, *, base_model: str, lora: LoraConfig | None
) -> None:
    """Refuse a KL reference from another run that has another base model or LoRA."""
    if not (config.kl_ref_adapter_path and config.kl_penalty_coef and lora):
        return
    path = Path(config.kl_ref_adapter_path)
    if path.parent.resolve() != checkpoints.resolve():  # the run's own steps belong to it
        hint = "Set `kl_ref_adapter_path` to a checkpoint with this run's base model and LoRA"
        check_belongs(path, base_model=base_model, lora=lora, hint=hint)


def weights_hash(path: Path) -> str:
    """The sha256 of the trained weights in the checkpoint at `path`, as its manifest has it."""
    files = (read_manifest(path) or {"files": {}})["files"]
    return str((files.get(ADAPTER) or files.get(FULL) or {}).get("sha256"))


def load_policy(
    directory: Path,
    lora: LoraConfig | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    world: World,
    fp8: bool,
) -> Policy:
    """Load a policy, or this process's shard of it, in the form that is fastest on `device`."""
    if fp8:
        _check_fp8(lora, dtype, device, world)
    if world.size > 1 and lora is None:
        raise Unsupported(
            "Full finetuning on several processes is not supported",
            hint="Train a LoRA, or use one process",
        )
    policy = load_model(
        directory,
        lora=lora,
        dtype=dtype,
        device=device,
        sharded_for=form_of_shards(device, world.size),
    )
    if device.type == "cuda":
        layers, sharded = policy.layers, world.size > 1
        policy.compiled = CompiledLayers(layers, policy.architecture, fp8=fp8, sharded=sharded)
    return policy


def form_of_shards(device: torch.device, processes: int) -> Literal["plain", "compiled"] | None:
    """The form in which each process loads its shards. A process that is alone has none."""
    if processes == 1:
        return None
    return "compiled" if device.type == "cuda" else "plain"


def _check_fp8(
    lora: LoraConfig | None, dtype: torch.dtype, device: torch.device, world: World
) -> None:
    if device.type != "cuda" or world.size > 1 or lora is None:
        raise Unsupported(
            "`quantization: fp8` can only train a LoRA, in one process on a CUDA GPU",
            hint="Remove `quantization`, or set `learner_devices` to one GPU",
        )
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY or dtype != torch.bfloat16:
        raise Unsupported(
            f"`quantization: fp8` does not work on `{torch.cuda.get_device_name(device)}` with "
            f"weights in `{dtype}`",
            hint="Remove `quantization`, or use an L4, L40S, H100 or newer",
        )
