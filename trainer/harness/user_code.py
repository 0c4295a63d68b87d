"""The user's code: import it by `module:name`, and call it without blocking the event loop."""

import asyncio
import contextlib
import difflib
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kit.errors import ConfigError, KitError
from trainer.harness.components import CustomConfig
from trainer.harness.user_texts import error_text
from trainer.harness.watchdog import LoopBlocked, users_code

T = TypeVar("T")
GRACE = 5.0  # seconds in which cancelled code may clean up; it is left alone then


def import_object(name: str) -> Any:
    """Import `module:name`. Modules in the working directory are found too."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"`{name}` does not name an object", hint="Write `module:name`")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)  # `python -m` does this, but a console script does not
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ConfigError(
            f"Cannot import `{name}`: {exc}",
            hint=f"Run in the directory that contains `{module_name}`, or install it",
        ) from exc
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"Cannot import `{name}`: {error_text(exc)}", hint=f"Fix `{module_name}`"
        ) from exc
    target: Any = module
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            near = difflib.get_close_matches(part, dir(target), n=1)
            hint = f"Did you mean `{near[0]}`?" if near else "Check the name after the colon"
            raise ConfigError(f"Module `{module_name}` has no `{part}`", hint=hint) from None
    return target


def create_component(config: CustomConfig) -> Any:
    """Create the user's component with the arguments given beside its `_type`."""
    factory = import_object(config.type)
    try:
        return factory(**config.arguments)
    except TypeError as exc:
        raise ConfigError(
            f"`{config.type}` does not accept these settings: {exc}",
            hint="Beside `_type`, give exactly the arguments of its constructor",
        ) from exc
    except KitError:
        raise
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"`{config.type}` cannot be created: {error_text(exc)}", hint="Fix its constructor"
        ) from exc


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a sync or async function. A sync one runs in a thread, so it blocks nothing else."""
    return await contain(_call(function, arguments, named))


async def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object with an async `__call__`
    ):
        return await function(*arguments, **named)
    result = await _in_thread(lambda: function(*arguments, **named))
    return await result if inspect.isawaitable(result) else result


async def contain(work: Awaitable[T]) -> T:
    """Await the user's code, and turn all that it may raise into an `Exception`.

    Code that a model wrote may exit, or raise what would end the event loop.
    """
    try:
        with users_code():
            return await work
    except Exception:
        raise
    except asyncio.CancelledError as caught:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("The code awaited a task that it had cancelled itself") from caught
    except LoopBlocked as caught:
        raise TookTooLong(str(caught)) from caught
    except BaseException as caught:
        raise RuntimeError(error_text(caught)) from caught


class TookTooLong(Exception):
    """The user's code exceeded its time limit."""


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Await the user's code for at most `seconds`, even if it ignores that it is cancelled."""
    task = asyncio.create_task(contain(work))
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TookTooLong(f"it took longer than {seconds:g} s")
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({task}, timeout=GRACE)


def _in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run in a daemon thread, which cannot keep the program alive if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # the call has timed out
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as caught:
            # A future rejects StopIteration, and the loop would end with some others.
            plain = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            error = caught if plain else RuntimeError(error_text(caught))
        with contextlib.suppress(RuntimeError):  # the loop is closed, the result unneeded
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future
