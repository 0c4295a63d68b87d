"""Starts `vllm serve` without a new Python that imports vLLM only to look at the model's class.

vLLM does so in another process, so that its API process never touches CUDA. Here that process is
a fork, which has vLLM imported already.
"""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

WITHIN = 120.0  # seconds to import the model's class


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


if __name__ == "__main__":  # not in the engine's process, which may import this file too
    from vllm.entrypoints.cli.main import main
    from vllm.model_executor.models import registry

    own = getattr(registry, "_run_in_subprocess", None)
    if own is not None:
        registry._run_in_subprocess = lambda look: in_fork(look) or own(look)
    main()
