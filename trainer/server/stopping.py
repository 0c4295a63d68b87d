"""The end of the process: bounded in time, whatever hangs."""

import logging
import os
import threading

from trainer.server.backend import Backend

logger = logging.getLogger(__name__)
STOP_SECONDS = 10.0  # for everything


def end_within(seconds: float, backend: Backend, *, code: int = 0) -> threading.Timer:
    """End this process after `seconds` if it has not ended by then.

    A thread does it, because the event loop may be what hangs. The workers die with this process.
    """
    timer = threading.Timer(seconds, _end, [seconds, backend, code])
    timer.daemon = True
    timer.start()
    return timer


def _end(seconds: float, backend: Backend, code: int) -> None:
    lost = backend.admission.under_way
    steps = f"; under way and finished by the next server: {', '.join(lost)}" if lost else ""
    logger.error("still not stopped after %.0f s: ending now%s", seconds, steps)
    logging.shutdown()
    os._exit(code)  # journal and checkpoints are whole at every moment
