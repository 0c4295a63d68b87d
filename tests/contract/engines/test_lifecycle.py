"""Engines start, restart after a death, and refuse settings that would break them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.contract.engines.choices import BOUND, differences, sample
from tests.contract.loras import write_lora
from tests.serving import vllm_python
from trainer.base_model.resolve import resolve
from trainer.engines.choose import vllm_program
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Engine
from trainer.engines.vllm import VllmEngine
from trainer.errors import Conflict, Unsupported, WorkerDied

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_vllm_rejects_by_name_settings_that_would_break_the_server(
    engines: dict[str, Engine],
) -> None:
    for name in ("host", "port", "api_key", "enable_lora", "logprobs_mode", "served_model_name"):
        with pytest.raises(Unsupported, match=rf"`engine_args\.{name}`"):
            await engines["vllm"].configure({name: "x"})
    with pytest.raises(Conflict, match=r"`engine_args\.max_model_len` is `2048` here"):
        await engines["vllm"].configure({"max_model_len": 4096})


async def test_vllm_does_not_restart_for_values_it_already_has(
    engines: dict[str, Engine],
) -> None:
    engine = engines["vllm"]
    assert isinstance(engine, VllmEngine)
    running = engine._process
    arguments = {"max_model_len": 2048, "enforce_eager": True, "tensor_parallel_size": 1}
    await engine.configure(arguments)
    assert engine._process is running


async def test_a_dead_engine_is_reported_and_restarts_with_its_loras(
    alone: Engine, tmp_path: Path
) -> None:
    engine = alone
    path = write_lora(tmp_path / "0001", seed=3)
    request = {"lora": f"lives{engine.name}@1", "temperature": 0, "max_tokens": 4}
    await engine.load(request["lora"], path)
    (before,) = await sample(engine, **request)
    victim = process_of(engine)
    long = asyncio.create_task(sample(engine, max_tokens=1900, n=64))
    await asyncio.sleep(0.05)  # started, and far from its end: a random model stops by chance
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"(The engine|vLLM).*killed"):
        await long
    await engine.load(request["lora"], path)
    (after,) = await sample(engine, **request)
    assert after.token_ids == before.token_ids
    assert max(differences(before, after)) < BOUND


def process_of(engine: Engine) -> int:
    """Return the process that samples; for vLLM its engine core, which its API briefly survives."""
    worker = engine._worker if isinstance(engine, EmbeddedEngine) else engine._process._process  # type: ignore[attr-defined]
    pid = int(worker.pid)
    while isinstance(engine, VllmEngine):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        named = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
        core = next((child for name, child in named.items() if "EngineCor" in name), None)
        if core:
            return core
        pid = int(children[0])
    return pid


async def test_a_vllm_that_cannot_start_reports_why(tmp_path: Path) -> None:
    engine = VllmEngine(
        resolve("tiny-random"),
        program=vllm_program(vllm_python()),
        log=tmp_path / "vllm.log",
        rank=4,
        cuda=False,
        arguments={"no_such_setting": 1},
    )
    with pytest.raises(WorkerDied, match="unrecognized arguments: --no-such-setting") as caught:
        await engine.start()
    assert "`engine_args`" in caught.value.hint and str(tmp_path / "vllm.log") in caught.value.hint
    assert not engine.running
