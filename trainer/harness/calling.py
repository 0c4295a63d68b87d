"""Calling the user's code, sync or async, without it holding anything up."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call what may be sync or async; a sync one runs in a thread, so that others go on."""
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  an object's own async call
        ):
            return await function(*arguments, **named)
        result = await _in_thread(lambda: function(*arguments, **named))
        return await result if inspect.isawaitable(result) else result
    except SystemExit as caught:  # of code that a model wrote: it must not end the program
        raise RuntimeError(f"SystemExit: {caught}") from caught
    except asyncio.CancelledError as caught:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("It awaited what it had cancelled itself") from caught


def _in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run in a daemon thread: one that hangs past its timeout must not keep the program alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # it timed out, and nobody waits any more
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except (StopIteration, SystemExit) as caught:  # a future would not take the first
            error = RuntimeError(f"{type(caught).__name__}: {caught}")
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run was given up
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future
