"""The learner's process: `python -m trainer.learner.worker --base-model tiny-random`."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kit.config import validate
from trainer import channel
from trainer.base_models import resolve
from trainer.config import LoraConfig, read_step_config
from trainer.device import default_device, default_dtype
from trainer.learner.learner import Learner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Settings = dict[str, Any]


def _lora(settings: Settings | None) -> LoraConfig | None:
    """The LoRA to train; None trains every weight of the model."""
    return None if settings is None else validate(LoraConfig, settings, source="lora")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    arguments = parser.parse_args()
    device, directory = default_device(), resolve(arguments.base_model)
    dtype = DTYPES.get(arguments.dtype) or default_dtype(directory, device)
    learner = Learner(arguments.base_model, directory, dtype=dtype, device=device)

    def prepare(checkpoints: str, lora: Settings | None) -> dict[str, int]:
        return {"step": learner.prepare(Path(checkpoints), _lora(lora))}

    def train(
        checkpoints: str, groups: list[dict[str, Any]], config: Settings, lora: Settings | None
    ) -> Iterator[dict[str, Any]]:
        return learner.train(Path(checkpoints), groups, read_step_config(config), _lora(lora))

    def score(checkpoints: str, lora: dict[str, Any], **tokens: list[int]) -> list[float]:
        return learner.score(Path(checkpoints), validate(LoraConfig, lora, source="lora"), **tokens)

    channel.serve({"prepare": prepare, "train": train, "score": score})


if __name__ == "__main__":
    main()
