"""What a run carries from step to step: trained weights, AdamW's moments, the generator.

On disk it is two safetensors files in a checkpoint; nothing is ever unpickled.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import CheckpointError
from trainer.learner.world import World
from trainer.model import Policy, load_lora, peft_config

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


class State:
    """The trained weights of `policy`, its optimizer and its randomness."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.names = policy.trainable()
        self.parameters = list(self.names.values())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1.0)
        self.generator = torch.Generator().manual_seed(seed)

    def write(self, directory: Path, *, base_model: str) -> None:
        """Write the files of a checkpoint into `directory`."""
        lora = self.policy.lora
        weights = on_cpu({name: it.detach() for name, it in self.names.items()})
        path = directory / (ADAPTER if lora else FULL)
        with ThreadPoolExecutor(1) as beside:  # the first file is on its way while this one is read
            written = beside.submit(save_file, weights, path, metadata={"format": "pt"})
            save_file(self._optimizer_tensors(), directory / OPTIMIZER)
            written.result()
        if lora is not None:
            config = json.dumps(peft_config(lora, base_model), indent=2)
            (directory / ADAPTER_CONFIG).write_text(config + "\n", encoding="utf-8")

    def read(self, directory: Path, world: World) -> None:
        """Go on from the checkpoint in `directory`, whose files have been verified."""
        if self.policy.lora is not None:
            load_lora(self.policy, world.tensors(lambda: read_tensors(directory / ADAPTER)))
        else:
            weights = world.tensors(lambda: read_tensors(directory / FULL))
            with torch.no_grad():
                for name, parameter in self.names.items():
                    parameter.copy_(weights[name])
        tensors = world.tensors(lambda: read_tensors(directory / OPTIMIZER))
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

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{key}.{name}": value.detach()
            for name, parameter in self.names.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {"generator": self.generator.get_state(), **on_cpu(tensors)}


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
