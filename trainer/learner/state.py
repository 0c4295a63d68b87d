"""What a run carries from step to step: trained weights, AdamW's moments, the generator.

On disk it is safetensors files in a checkpoint; nothing is ever unpickled.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kit.manifest import read_manifest
from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import CheckpointError
from trainer.learner.tensor_file import write_tensors
from trainer.learner.world import World
from trainer.policy.model import Policy, load_lora, peft_config

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL = "model.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "optimizer.{}.safetensors"  # one for each moment: as large as the weights, all at once


class State:
    """The trained weights of `policy`, its optimizer and its randomness."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.names = policy.trainable()
        self.parameters = list(self.names.values())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1.0)
        self.generator = torch.Generator().manual_seed(seed)

    def write(self, directory: Path, *, base_model: str) -> dict[str, str]:
        """Write the files of a checkpoint into `directory`; tells the sha256 of the large ones."""
        lora = self.policy.lora
        weights: dict[str, Tensor] = {name: it.detach() for name, it in self.names.items()}
        files = {ADAPTER if lora else FULL: weights, **self._optimizer_files()}
        with ThreadPoolExecutor(len(files)) as pool:  # a file is on its way while the next is read
            written = {
                name: pool.submit(write_tensors, on_cpu(tensors), directory / name)
                for name, tensors in files.items()
            }
        if lora is not None:
            config = json.dumps(peft_config(lora, base_model), indent=2)
            (directory / ADAPTER_CONFIG).write_text(config + "\n", encoding="utf-8")
        return {name: one.result() for name, one in written.items()}

    def read(self, directory: Path, world: World) -> None:
        """Go on from the checkpoint in `directory`, whose files have been verified."""
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
                self.optimizer.state[parameter] = {
                    "step": tensors[f"step.{name}"],
                    **{
                        moment: tensors[f"{moment}.{name}"].to(parameter.device)
                        for moment in MOMENTS
                    },
                }

    def _optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        """What each file of the optimizer holds; the first has the counts and the generator too."""
        held = [(name, self.optimizer.state.get(it, {})) for name, it in self.names.items()]
        counts = {f"step.{name}": state["step"] for name, state in held if state}
        first, second = (
            {f"{moment}.{name}": state[moment].detach() for name, state in held if state}
            for moment in MOMENTS
        )
        first = {"generator": self.generator.get_state(), **counts, **first}
        return dict(zip(map(OPTIMIZER.format, MOMENTS), (first, second), strict=True))


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU; from a GPU all of them are on their way at once."""
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
    """The optimizer's tensors, from the files that the manifest vouches for."""
    manifest = read_manifest(directory) or {"files": {}}
    tensors: dict[str, Tensor] = {}
    for name in manifest["files"]:
        if fnmatch(name, "optimizer*.safetensors"):  # older checkpoints have one
            tensors |= read_tensors(directory / name)
    if "generator" not in tensors:
        raise CheckpointError(
            f"The checkpoint `{directory}` has no state of an optimizer",
            hint="Use the step before it, or pull it again",
        )
    return tensors


def lora_shape(lora: LoraConfig | None) -> dict[str, Any] | None:
    """What of a LoRA's settings must not change during a run; None trains every weight."""
    return lora.model_dump(mode="json", exclude={"seed"}) if lora else None


def check_belongs(path: Path, *, base_model: str, lora: LoraConfig | None) -> None:
    """Raise unless the checkpoint at `path` is whole, and of this base model and LoRA."""
    manifest = checkpoint.verify(path)
    for what, found, wanted in (
        ("base model", manifest.get("base_model"), base_model),
        ("LoRA", manifest.get("lora"), lora_shape(lora)),
    ):
        if found != wanted:
            raise CheckpointError(
                f"The checkpoint `{path}` is of the {what} `{found}`, not `{wanted}`",
                hint="Register the run under another name, or with what it was started with",
            )
