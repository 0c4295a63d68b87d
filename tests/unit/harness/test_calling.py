"""What the user's code may do without ending the run of which it is a part."""

import asyncio
import sys

import pytest

from trainer.harness.user_code import call


async def leave() -> None:
    sys.exit("the model wrote exit()")


async def cancel_itself() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await task


@pytest.mark.parametrize("function", [leave, lambda: sys.exit("the model wrote exit()")])
async def test_code_that_exits_fails_and_ends_nothing_else(function: object) -> None:
    with pytest.raises(RuntimeError, match=r"SystemExit: the model wrote exit\(\)"):
        await call(function)  # type: ignore[arg-type]


async def test_code_that_awaits_what_it_cancelled_fails_and_ends_nothing_else() -> None:
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await call(cancel_itself)


async def test_who_is_cancelled_from_outside_ends() -> None:
    task = asyncio.create_task(call(asyncio.sleep, 60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call(asyncio.sleep, 60), 0.01)
