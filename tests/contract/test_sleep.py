"""vLLM frees the GPU it shares with the learner, and comes back at its next use."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.loras import write_lora
from trainer.base_model.resolve import resolve
from trainer.engines.choose import vllm_program
from trainer.engines.engine import Delta, SampleRequest
from trainer.engines.vllm import VllmEngine
from trainer.engines.vllm_args import WITHOUT_KERNELS
from trainer.errors import NotFound

FAKE = [sys.executable, str(Path(__file__).with_name("fake_vllm.py"))]
HAS_CUDA = any(Path("/dev").glob("nvidia[0-9]*"))


class Shared:
    """Starts vLLM on a GPU that it shares with the learner."""

    def __init__(self, directory: Path, real: bool) -> None:
        self.directory = directory
        self.program = vllm_program(None) if real else FAKE
        self.engines: list[VllmEngine] = []

    async def start(self, *, shared: bool = True, **arguments: Any) -> VllmEngine:
        engine = VllmEngine(
            resolve("tiny-random"),
            program=self.program,
            log=self.directory / "vllm.log",
            rank=4,
            cuda=True,
            arguments={
                "gpu_memory_utilization": 0.1,
                "max_model_len": 2048,
                "enforce_eager": True,  # starts faster
                **arguments,
            },
            shared=shared,
        )
        self.engines.append(engine)
        await engine.start()
        return engine


@pytest_asyncio.fixture(
    params=["fake", pytest.param("real", marks=pytest.mark.gpu)] if HAS_CUDA else ["fake"]
)
async def vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Shared]:
    monkeypatch.setenv("FAKE_VLLM_REQUESTS", str(tmp_path / "requests"))
    shared = Shared(tmp_path, request.param == "real")
    yield shared
    for engine in shared.engines:
        await engine.stop()


async def sample(engine: VllmEngine, lora: str | None = None) -> list[int]:
    whole = Delta(0)
    request = SampleRequest([*b"a prompt"], lora=lora, max_tokens=8, temperature=0)
    async for delta in engine.sample(request):
        whole.extend(delta)
    return whole.token_ids


async def test_it_stops_the_first_time_and_sleeps_from_then_on(
    vllm: Shared, tmp_path: Path
) -> None:
    engine = await vllm.start()
    await engine.load("run@1", write_lora(tmp_path / "lora", seed=1))
    before = await sample(engine, "run@1")
    assert await engine.make_room() and not engine.running
    assert await engine.make_room() and not engine.running  # the learner may fail twice
    assert await sample(engine, "run@1") == before  # restarted, with its LoRA
    for _ in range(2):
        assert await engine.make_room() and engine.running and engine._process.asleep
        assert await engine.make_room()
        assert await sample(engine, "run@1") == before
        assert not engine._process.asleep


async def test_a_vllm_started_with_sleep_mode_sleeps_the_first_time(vllm: Shared) -> None:
    engine = await vllm.start(enable_sleep_mode=True)
    assert await engine.make_room() and engine.running
    assert len(await sample(engine)) == 8


async def test_a_lora_unloaded_during_sleep_is_gone_after_waking(
    vllm: Shared, tmp_path: Path
) -> None:
    engine = await vllm.start(enable_sleep_mode=True)
    await engine.load("run@1", write_lora(tmp_path / "one", seed=1))
    await engine.load("run@2", write_lora(tmp_path / "two", seed=2))
    await engine.make_room()
    await engine.unload("run@1")
    with pytest.raises(NotFound):
        await sample(engine, "run@1")
    assert await sample(engine, "run@2")
    served = (await engine._process._client.request("GET", "/v1/models")).json()["data"]
    assert [model["id"] for model in served] == ["base", "run@2.1"]
    await engine.make_room()
    await engine.load("run@1", write_lora(tmp_path / "other", seed=3))
    assert await sample(engine, "run@1")


async def test_it_makes_no_room_on_its_own_gpu_or_if_sleep_is_disabled(
    vllm: Shared,
) -> None:
    alone = await vllm.start(shared=False)
    assert not await alone.make_room() and alone.running
    await alone.stop()
    forbidden = await vllm.start(enable_sleep_mode=False)
    assert not await forbidden.make_room() and forbidden.running


async def test_a_vllm_that_dies_asleep_is_restarted(vllm: Shared) -> None:
    engine = await vllm.start(enable_sleep_mode=True)
    await engine.make_room()
    assert engine._process._process
    os.killpg(engine._process._process.pid, signal.SIGKILL)
    await engine._process._process.wait()
    assert len(await sample(engine)) == 8


async def test_a_vllm_that_dies_in_our_kernels_starts_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_VLLM_REQUESTS", str(tmp_path / "requests"))
    log = tmp_path / "vllm.log"
    log.write_text('  File "/kit/in_vllm/lora_kernel.py", line 9, in add_lora\n')  # of an older run
    shared = Shared(tmp_path, real=False)
    engine = await shared.start()
    assert engine._defaults["worker_extension_cls"]
    # It may also die later, when it meets a batch of another size.
    assert engine._process._process
    with log.open("a") as file:
        file.write('  File "/kit/in_vllm/lora_kernel.py", line 9, in add_lora\n')
    os.killpg(engine._process._process.pid, signal.SIGKILL)
    await engine._process._process.wait()
    assert len(await sample(engine)) == 8
    assert engine._defaults["worker_extension_cls"] == WITHOUT_KERNELS
    monkeypatch.setenv("FAKE_VLLM_FAILS", "kernels")
    other = await shared.start()
    try:
        assert "starts without our kernels" in caplog.text
        assert len(await sample(other)) == 8
    finally:
        await engine.stop()
        await other.stop()


async def test_a_vllm_that_cannot_start_with_sleep_mode_starts_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setenv("FAKE_VLLM_FAILS", "start")
    engine = await Shared(tmp_path, real=False).start()
    try:
        assert await engine.make_room() and not engine.running
        assert len(await sample(engine)) == 8
        assert not await engine.make_room() and engine.running
    finally:
        await engine.stop()


@pytest.mark.parametrize("fails", ["/sleep?level=1", "/wake_up"])
async def test_a_vllm_that_cannot_sleep_or_wake_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setenv("FAKE_VLLM_FAILS", fails)
    vllm = Shared(tmp_path, real=False)
    engine = await vllm.start(enable_sleep_mode=True)
    try:
        assert await engine.make_room()
        assert len(await sample(engine)) == 8
        processes = {line.split()[0] for line in (tmp_path / "requests").read_text().splitlines()}
        assert len(processes) == 2
    finally:
        await engine.stop()


async def test_after_a_crash_a_request_and_a_restart_start_vllm_once(
    vllm: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that lost its engine restarts it while requests that wait do so too."""
    engine = await vllm.start()
    process = engine._process._process
    assert process
    os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    caplog.set_level(logging.INFO, "trainer.engines.vllm_process")
    caplog.clear()
    await asyncio.gather(engine.start(), sample(engine), engine.start(), sample(engine))
    assert caplog.text.count("vLLM is starting") == 1
    assert engine.running
