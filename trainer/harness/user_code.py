"""The user's own code: found by `module:name`, and called without blocking others."""

import asyncio
import contextlib
import difflib
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import ConfigError
from trainer.harness.components import CustomConfig


def load(name: str) -> Any:
    """The object `module:name`; modules beside the config file or where one stands are found."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"`{name}` names no object", hint="Write `module:name`")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a console script does not
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ConfigError(
            f"`{name}` cannot be imported: {exc}",
            hint=f"Run where `{module_name}` can be imported, or install it",
        ) from exc
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"Did you mean `{near[0]}`?" if near else "Check the name after the colon"
            raise ConfigError(f"Module `{module_name}` has no `{part}`", hint=hint) from None
    return found


def instance(config: CustomConfig) -> Any:
    """The user's component, made with the arguments that stand beside its `_type`."""
    make = load(config.type)
    try:
        return make(**config.arguments)
    except TypeError as exc:
        raise ConfigError(
            f"`{config.type}` does not take these settings: {exc}",
            hint="Give the arguments of its constructor beside `_type`",
        ) from exc


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
