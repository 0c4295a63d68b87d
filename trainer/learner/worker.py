"""The learner's process: `python -m trainer.learner.worker --base-model tiny-random`.

With `--processes N` (by default one for each GPU) it starts N - 1 more of itself, which train
each step together with it.
"""

import argparse
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.config import validate
from kit.errors import KitError
from trainer import channel
from trainer.base_models import resolve
from trainer.config import LoraConfig, read_step_config
from trainer.device import default_device, default_dtype, keep_freed_memory
from trainer.learner.learner import Learner
from trainer.learner.world import World, join, start_others

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Settings = dict[str, Any]
Handlers = dict[str, Callable[..., Any]]


def _lora(settings: Settings | None) -> LoraConfig | None:
    """The LoRA to train; None trains every weight of the model."""
    return None if settings is None else validate(LoraConfig, settings, source="lora")


def handlers(learner: Learner) -> Handlers:
    """The calls that the server makes."""

    def prepare(checkpoints: str, lora: Settings | None) -> dict[str, int]:
        return {"step": learner.prepare(Path(checkpoints), _lora(lora))}

    def train(
        checkpoints: str, groups: list[dict[str, Any]], config: Settings, lora: Settings | None
    ) -> Iterator[dict[str, Any]]:
        return learner.train(Path(checkpoints), groups, read_step_config(config), _lora(lora))

    def score(checkpoints: str, lora: Settings, **tokens: list[int]) -> list[float]:
        return learner.score(Path(checkpoints), validate(LoraConfig, lora, source="lora"), **tokens)

    return {"prepare": prepare, "train": train, "score": score}


def told_to_all(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of the first process: it tells the others of the call before it starts."""

    def call(**params: Any) -> Any:
        dist.broadcast_object_list([name, params], src=0)
        return handler(**params)

    return call


def follow(calls: Handlers) -> None:
    """What the other processes do: the same calls as the first one, without answers."""
    while True:
        call: list[Any] = [None, None]
        dist.broadcast_object_list(call, src=0)
        try:
            result = calls[call[0]](**call[1])
            for _ in result if isinstance(result, Iterator) else ():
                pass
        except KitError as error:
            logger.info("not done: %s", error.message)  # the first process answers with it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 1))
    arguments = parser.parse_args()
    keep_freed_memory()
    device, directory = default_device(), resolve(arguments.base_model)
    dtype = DTYPES.get(arguments.dtype) or default_dtype(directory, device)
    world = _join(arguments.processes, device)
    learner = Learner(arguments.base_model, directory, dtype=dtype, device=device, world=world)
    calls = handlers(learner)
    if world.rank > 0:
        follow(calls)
    if world.size > 1:
        calls = {name: told_to_all(name, handler) for name, handler in calls.items()}
    channel.serve(calls)


def _join(processes: int, device: torch.device) -> World:
    if processes > 1 and "RANK" not in os.environ:
        start_others(processes)
    return join(device)


if __name__ == "__main__":
    main()
