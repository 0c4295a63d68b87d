"""The learner's process: the only one, or one of several that train each step together.

`trainer/learner/torchrun.py` starts it. The first process answers the server; the others follow it.
"""

import argparse
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kit.config import validate
from kit.errors import KitError
from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.errors import OutOfMemory, storage_error
from trainer.learner.ahead import Ahead, next_request
from trainer.learner.learner import Learner
from trainer.learner.precedence import Precedence
from trainer.learner.prepare import Group
from trainer.learner.ready import Ready
from trainer.learner.warm_up import warm_up
from trainer.learner.world import World, join
from trainer.policy.device import default_device, default_dtype, keep_freed_memory, release_memory
from trainer.processes.large_json import parse
from trainer.processes.worker import OUT_OF_MEMORY, die_with_parent, run_worker, serve, take_stdin
from trainer.step_config import SftConfig, read_step_config

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OUT_OF_MEMORY_KEY = "out of memory"
Settings = dict[str, Any]
Handlers = dict[str, Callable[..., Any]]


def _lora(settings: Settings | None) -> LoraConfig | None:
    """Validate the LoRA to train. None trains every weight of the model."""
    return None if settings is None else validate(LoraConfig, settings, source="lora")


def handlers(learner: Learner) -> Handlers:
    """The functions that the server can call."""

    def compile_ahead(lora: Settings) -> None:
        # Processes that share the weights compile other layers, with the first step.
        if learner.device.type == "cuda" and learner.world.size == 1:
            settings = validate(LoraConfig, lora, source="lora")
            warm_up(
                learner.directory,
                settings,
                dtype=learner.dtype,
                device=learner.device,
                fp8=learner.fp8,
            )

    def load(lora: Settings | None) -> None:
        learner.load(_lora(lora))

    def prepare(checkpoints: str, lora: Settings | None) -> dict[str, int]:
        return {"step": learner.prepare(Path(checkpoints), _lora(lora))}

    def train(
        checkpoints: str,
        groups: list[Group] | Ready,
        config: Settings,
        lora: Settings | None,
        parent: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        step = read_step_config(config)
        return learner.train(Path(checkpoints), groups, step, _lora(lora), parent=parent)

    def score(checkpoints: str, step: int, lora: Settings, **tokens: list[int]) -> list[float]:
        settings = validate(LoraConfig, lora, source="lora")
        return learner.score(Path(checkpoints), step, settings, **tokens)

    return {
        **{"warm_up": compile_ahead, "load": load, "prepare": prepare, "train": train},
        **{"score": score, "release": release_memory},
    }


def reading(
    train: Callable[..., Any], learner: Learner, precedence: Precedence | None = None
) -> Callable[..., Any]:
    """Read a request's groups for `train` from their file, which only the server's machine has.

    A single process also prepares the next request while it trains, if that is journaled by then.
    """

    def prepare(path: Path) -> Ready | None:
        request = parse(path.read_bytes())
        config = read_step_config(request["config"])
        if isinstance(config, SftConfig):
            return None
        return learner.ready(request["groups"], config, request["step"] - 1)

    ahead = Ahead(prepare)

    def call(request: str, **params: Any) -> Iterator[Any]:
        path = Path(request)
        following = next_request(path) if learner.world.size == 1 else None

        def before_row() -> None:
            waits = ahead.look(following)
            if precedence:
                precedence.next_row(waits)

        if precedence:
            precedence.next_step()
        learner.before_row = before_row
        for row in train(groups=ahead.take(path) or groups_of(path), **params):
            yield row
            ahead.look(following)

    return call


def groups_of(path: Path) -> list[Group]:
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise storage_error(exc, f"The request cannot be read from `{path}`") from exc
    groups: list[Group] = parse(text, limit=None)["groups"]
    return groups


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
        with suppress(Exception):  # the store is lost with its machine
            out_of_memory = agree_on_out_of_memory(out_of_memory)
        logging.shutdown()
        # A normal exit would wait forever for the lost process.
        os._exit(OUT_OF_MEMORY if out_of_memory else 1)


def agree_on_out_of_memory(here: bool) -> bool:
    """Whether this or another process ran out of memory.

    The others only see a lost connection, and may exit before the process that caused it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, timeout=timedelta(seconds=10))
    if here:
        store.set(OUT_OF_MEMORY_KEY, "yes")
    return store.check([OUT_OF_MEMORY_KEY])


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
    parser.add_argument("--record", choices=["nothing", "own", "all"], default="nothing")
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
        record=arguments.record,
    )
    calls = handlers(learner)
    if world.rank > 0:
        follow(world, calls)
    if world.size > 1:
        calls = {name: broadcast_call(world, name, handler) for name, handler in calls.items()}
    precedence = Precedence.from_environment(device) if world.size == 1 else None
    serve({**calls, "train": reading(calls["train"], learner, precedence)})


if __name__ == "__main__":
    run_worker(main)
