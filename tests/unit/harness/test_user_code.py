"""The user's code may exit or cancel itself without ending the rest of the run."""

import asyncio
import sys

import pytest

from trainer.harness.user_code import call


async def exit_program() -> None:
    sys.exit("the model wrote exit()")


async def cancel_itself() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await task


@pytest.mark.parametrize("function", [exit_program, lambda: sys.exit("the model wrote exit()")])
async def test_code_that_exits_fails_alone(function: object) -> None:
    with pytest.raises(RuntimeError, match=r"SystemExit: the model wrote exit\(\)"):
        await call(function)  # type: ignore[arg-type]


async def test_code_that_awaits_a_task_it_cancelled_fails_alone() -> None:
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await call(cancel_itself)


async def test_a_cancelled_or_timed_out_call_ends() -> None:
    task = asyncio.create_task(call(asyncio.sleep, 60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call(asyncio.sleep, 60), 0.01)
