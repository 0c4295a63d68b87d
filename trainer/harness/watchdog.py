"""Interrupts the user's code if it blocks the event loop: nothing inside the loop could do it."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

BEAT = 1.0  # seconds between two signs of life of the event loop
_interruptible = ContextVar("interruptible", default=False)


class LoopBlocked(BaseException):
    """Raised inside the code that blocks the loop. Code that catches `Exception` lets it pass."""


@contextmanager
def users_code() -> Iterator[None]:
    """Mark code that `watch` may interrupt, with the tasks that it starts.

    The kit's own code would be left halfway: a slow disk must not lose a group.
    """
    before = _interruptible.get()
    _interruptible.set(True)
    try:
        yield
    finally:
        _interruptible.set(before)


@contextmanager
def watch(limit: float) -> Iterator[None]:
    """Raise `LoopBlocked` in `users_code` that keeps the loop from turning for `limit` seconds.

    A timer of the operating system does it, so that it also works while a C function such as
    `time.sleep` or a regular expression holds the interpreter.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    loop = asyncio.get_running_loop()

    timer: asyncio.Handle = loop.call_soon(lambda: None)

    def interrupt(_: int, __: FrameType | None) -> None:
        # Without a task the loop turns again.
        if asyncio.current_task(loop) is not None and _interruptible.get():
            raise LoopBlocked(f"it blocked the event loop for longer than {limit:g} s")

    def beat() -> None:
        nonlocal timer
        # The user's code may have taken the signal for a purpose of its own.
        if signal.getsignal(signal.SIGALRM) is interrupt:
            signal.setitimer(signal.ITIMER_REAL, limit, limit)
        timer = loop.call_later(min(BEAT, limit / 2), beat)

    before = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    beat()
    try:
        yield
    finally:
        timer.cancel()
        if signal.getsignal(signal.SIGALRM) is interrupt:
            signal.setitimer(signal.ITIMER_REAL, left, interval)
            signal.signal(signal.SIGALRM, before)
