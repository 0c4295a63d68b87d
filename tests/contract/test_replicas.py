"""Engines of other machines: real `trainer engine` processes that dial a head on loopback."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.manifest import write_manifest
from tests.contract.loras import write_lora
from tests.contract.nodes import KEY, both, head, node, until
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Delta, SampleRequest
from trainer.machines.remote_engine import RemoteEngine
from trainer.machines.replicas import Replicas

PROMPT = [256, 257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]


def remote_engine_of(replicas: Replicas) -> RemoteEngine:
    (engine,) = [it.engine for it in replicas._ready if isinstance(it.engine, RemoteEngine)]
    return engine


async def sample(replicas: Replicas, **request: Any) -> list[Delta]:
    request = {"prompt_ids": PROMPT, "max_tokens": 4, "temperature": 0, **request}
    return [delta async for delta in replicas.sample(SampleRequest(**request))]


async def test_requests_are_shared_out_and_a_killed_machine_loses_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with head(tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        expected = await sample(replicas, lora="run@1")
        with node(replicas, tmp_path) as process:
            await both(replicas)
            rollouts = [
                asyncio.create_task(
                    sample(replicas, lora="run@1", n=4, max_tokens=400, temperature=1.0)
                )
                for _ in range(8)
            ]
            await until(lambda: [it.busy for it in replicas._ready] == [16, 16])
            process.send_signal(signal.SIGKILL)
            answers = await asyncio.gather(*rollouts)
        assert all(len(choices) == 4 for choices in answers)
        assert all(choice.finish_reason for choices in answers for choice in choices)
        assert "is lost with 16 choices under way" in caplog.text
        # It returns with nothing loaded, and serves only once it holds what is served.
        await replicas.load("run@2", write_lora(tmp_path / "0002", seed=2))
        with node(replicas, tmp_path):
            await both(replicas)
            engine = remote_engine_of(replicas)
            assert engine._held == {"run@1", "run@2"}
            request = SampleRequest(PROMPT, lora="run@1", max_tokens=4, temperature=0)
            (there,) = [delta async for delta in engine.sample(request)]
            assert there.token_ids == expected[0].token_ids
            assert there.logprobs == pytest.approx(expected[0].logprobs, abs=1e-4)


async def test_a_lora_that_arrives_damaged_is_refused_there_and_still_served_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lora(tmp_path / "0001", seed=1)
    write_manifest(path, {"step": 1})
    weights = path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    async with head(tmp_path) as replicas:
        with node(replicas, tmp_path):
            await both(replicas)
            await replicas.load("run@1", path)
            assert len(replicas._ready) == 1
            assert "`run@1` arrived damaged: the sha256 of `adapter_model.safetensors`" in (
                caplog.text
            )
            assert await sample(replicas, lora="run@1")
            await replicas.unload("run@1")
            await both(replicas)  # the machine is well: it joins again once it can catch up


async def test_an_engine_that_died_there_is_started_again_before_it_serves(
    tmp_path: Path,
) -> None:
    async with head(tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        with node(replicas, tmp_path) as process:
            await both(replicas)
            first = remote_engine_of(replicas)
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            (engine,) = [int(child) for child in listed.split()]
            rollouts = [
                asyncio.create_task(
                    sample(replicas, lora="run@1", n=8, max_tokens=200, temperature=1.0)
                )
                for _ in range(4)
            ]
            await until(lambda: [it.busy for it in replicas._ready] == [16, 16])
            os.kill(engine, signal.SIGKILL)
            assert [len(choices) for choices in await asyncio.gather(*rollouts)] == [8] * 4
            await both(replicas)
            assert remote_engine_of(replicas) is not first and process.poll() is None


async def test_our_own_engine_comes_back_while_others_answer(tmp_path: Path) -> None:
    async with head(tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        with node(replicas, tmp_path):
            await both(replicas)
            own = replicas._own.engine
            assert isinstance(own, EmbeddedEngine) and own._worker.pid
            rollouts = [
                asyncio.create_task(
                    sample(replicas, lora="run@1", n=8, max_tokens=200, temperature=1.0)
                )
                for _ in range(4)
            ]
            await until(lambda: [it.busy for it in replicas._ready] == [16, 16])
            os.kill(own._worker.pid, signal.SIGKILL)
            assert [len(choices) for choices in await asyncio.gather(*rollouts)] == [8] * 4
            await both(replicas)


async def test_a_wrong_key_is_refused_and_nothing_but_health_is_open(tmp_path: Path) -> None:
    async with head(tmp_path) as replicas:
        with node(replicas, tmp_path, key="guess") as process:
            code = await asyncio.to_thread(process.wait)
            assert process.stderr
            told = process.stderr.read()
        assert code == 1 and "error: The head rejected the key\n\nhint: Set `ART_API_KEY`" in told
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{replicas.port}") as client:
            assert (await client.get("/health")).text == "ok\n"
            for path in ("/", "/v1/models", "/metrics"):
                assert (await client.get(path)).status_code == 401
        assert len(replicas._ready) == 1


async def test_a_head_that_is_done_sends_everyone_home(tmp_path: Path) -> None:
    async with head(tmp_path) as replicas:
        with node(replicas, tmp_path) as process:
            await both(replicas)
            await replicas.stop()
            assert await asyncio.to_thread(process.wait) == 0


async def test_what_a_machine_sends_wrongly_costs_only_its_place(tmp_path: Path) -> None:
    from websockets.asyncio.client import connect

    async with head(tmp_path) as replicas:
        for nonsense in ("not json", "[]", json.dumps({"id": 1, "row": "x"}), "[" * 100_000):
            url, key = f"ws://127.0.0.1:{replicas.port}", {"Authorization": f"Bearer {KEY}"}
            async with connect(url, additional_headers=key, proxy=None) as connection:
                await connection.recv()  # `begin`
                await connection.send(nonsense)
                if "row" not in nonsense:
                    await connection.wait_closed()
        assert await sample(replicas)
        assert len(replicas._ready) == 1
