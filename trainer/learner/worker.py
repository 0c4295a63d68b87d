"""The learner's process, alone or one of several that train each step together.

`trainer/learner/torchrun.py` starts it. The first one answers the server, the others follow it.
"""

import argparse
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kit.config import validate
from kit.errors import KitError
from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig, read_step_config
from trainer.errors import OutOfMemory
from trainer.learner.learner import Learner
from trainer.learner.world import World, join
from trainer.policy.device import default_device, default_dtype, keep_freed_memory, release_memory
from trainer.processes.worker import OUT_OF_MEMORY, die_with_parent, serve, take_stdin

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

    return {"prepare": prepare, "train": train, "score": score, "release": release_memory}


def broadcast_call(world: World, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of the first process: it tells the others of the call before it starts."""

    def call(**params: Any) -> Any:
        with exit_on_failure():
            world.broadcast([name, params])
            result = handler(**params)
        return rows(result) if isinstance(result, Iterator) else result

    def rows(result: Iterator[Any]) -> Iterator[Any]:
        with exit_on_failure():
            yield from result

    return call


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """End this process when the others cannot go on with it; all are then started again."""
    try:
        yield
    except GeneratorExit:
        raise
    except Exception as error:
        # All of them refuse a bad request, but one alone may be out of memory.
        crowded = isinstance(error, OutOfMemory)
        if isinstance(error, KitError) and not crowded:
            raise
        logger.exception("the learner's processes lost each other")
        logging.shutdown()
        # What waits for a lost process would never return.
        os._exit(OUT_OF_MEMORY if crowded else 1)


def follow(world: World, calls: Handlers) -> None:
    """What the other processes do: the same calls as the first one, without answers."""
    os.close(take_stdin())  # it is the first process that the server talks to
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logger.info("process %s of %s has joined", world.rank, world.size)
    while True:
        with exit_on_failure():
            name, params = world.broadcast()
            try:
                result = calls[name](**params)
                for _ in result if isinstance(result, Iterator) else ():
                    pass
            except OutOfMemory:
                raise  # the others are in mid-step
            except KitError as error:
                logger.info("not done: %s", error.message)  # the first process answers with it


def main(given: list[str] | None = None) -> None:
    # Whoever started this process would start another in its place.
    die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--quantization", choices=["fp8"], help="how frozen weights are held")
    arguments = parser.parse_args(given)
    keep_freed_memory()
    device, directory = default_device(), resolve(arguments.base_model)
    dtype = DTYPES.get(arguments.dtype) or default_dtype(directory, device)
    world = join(device)
    learner = Learner(
        arguments.base_model,
        directory,
        dtype=dtype,
        device=device,
        world=world,
        fp8=arguments.quantization == "fp8",
    )
    calls = handlers(learner)
    if world.rank > 0:
        follow(world, calls)
    if world.size > 1:
        calls = {name: broadcast_call(world, name, handler) for name, handler in calls.items()}
    serve(calls)


if __name__ == "__main__":
    main()
