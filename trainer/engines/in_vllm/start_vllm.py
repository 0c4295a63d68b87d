"""Starts `vllm serve` with processes that are forks: each has vLLM imported already.

Everywhere, the process that looks at the model's class is a fork, so that vLLM's API process never
touches CUDA. On a CPU, so are the engine and its worker, which would import vLLM for ten seconds
each.
"""

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

WITHIN = 120.0  # seconds to import the model's class
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def in_fork(look: Callable[[], Any]) -> Any:
    """Return what `look` returns in a forked process, or None if that fails."""
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, look))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(WITHIN) else None
    except EOFError:  # it failed, or died
        return None
    finally:
        process.kill()
        process.join()


def _send(there: Connection, look: Callable[[], Any]) -> None:
    there.send(look())


def keep_forking(platform: Any) -> None:
    """Keep the start method of processes, which the platform sets whenever it checks settings."""
    check = platform.check_and_update_config

    def checked(config: Any) -> None:
        chosen = os.environ[METHOD]
        check(config)
        os.environ[METHOD] = chosen

    platform.check_and_update_config = checked


if __name__ == "__main__":  # not in the engine's process, which may import this file too
    from vllm.entrypoints.cli.main import main
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if METHOD in os.environ and current_platform.is_cpu():
        keep_forking(current_platform)
    own = getattr(registry, "_run_in_subprocess", None)
    if own is not None:
        registry._run_in_subprocess = lambda look: in_fork(look) or own(look)
    main()
