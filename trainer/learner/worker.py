"""The learner's process: the only one, or one of several that train each step together.

`trainer/learner/torchrun.py` starts it. The first process answers the server; the others follow it.
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
    """Validate the LoRA to train. None trains every weight of the model."""
    return None if settings is None else validate(LoraConfig, settings, source="lora")


def handlers(learner: Learner) -> Handlers:
    """The functions that the server can call."""

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
    """Wrap a handler of the first process so that it sends each call to the others first."""

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
    """Exit on an error that leaves the processes out of step. The server then restarts all."""
    try:
        yield
    except GeneratorExit:
        raise
    except Exception as error:
        # All processes reject a bad request, but a single one may run out of memory.
        out_of_memory = isinstance(error, OutOfMemory)
        if isinstance(error, KitError) and not out_of_memory:
            raise
        logger.exception("the learner's processes lost each other")
        logging.shutdown()
        # A normal exit would wait forever for the lost process.
        os._exit(OUT_OF_MEMORY if out_of_memory else 1)


def follow(world: World, calls: Handlers) -> None:
    """Make the same calls as the first process, without answering the server."""
    os.close(take_stdin())  # only the first process talks to the server
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
                raise  # the others are in the middle of a step
            except KitError as error:
                logger.info("call rejected: %s", error.message)  # the first process reports it


def main(given: list[str] | None = None) -> None:
    # A parent that restarts would start a second process beside this one.
    die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--quantization", choices=["fp8"], help="format of frozen weights")
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
