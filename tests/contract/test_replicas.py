"""Engines on other machines: real `trainer engine` processes that join a head on loopback."""

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
from tests.contract.nodes import KEY, both_ready, head, node, wait_until
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


async def test_requests_are_balanced_and_survive_a_killed_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with head(tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        expected = await sample(replicas, lora="run@1")
        with node(replicas, tmp_path) as process:
            await both_ready(replicas)
            rollouts = [
                asyncio.create_task(
                    sample(replicas, lora="run@1", n=4, max_tokens=400, temperature=1.0)
                )
                for _ in range(8)
            ]
            await wait_until(lambda: [it.busy for it in replicas._ready] == [16, 16])
            process.send_signal(signal.SIGKILL)
            results = await asyncio.gather(*rollouts)
        assert all(len(choices) == 4 for choices in results)
        assert all(choice.finish_reason for choices in results for choice in choices)
        assert "is lost with 16 choices under way" in caplog.text
        # It comes back with nothing loaded, and is ready only when it has every served LoRA.
        await replicas.load("run@2", write_lora(tmp_path / "0002", seed=2))
        with node(replicas, tmp_path):
            await both_ready(replicas)
            engine = remote_engine_of(replicas)
            assert engine._held == {"run@1", "run@2"}
            request = SampleRequest(PROMPT, lora="run@1", max_tokens=4, temperature=0)
            (remote,) = [delta async for delta in engine.sample(request)]
            assert remote.token_ids == expected[0].token_ids
            assert remote.logprobs == pytest.approx(expected[0].logprobs, abs=1e-4)


async def test_a_damaged_lora_is_rejected_there_and_still_served_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lora(tmp_path / "0001", seed=1)
    write_manifest(path, {"step": 1})
    weights = path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    async with head(tmp_path) as replicas:
        with node(replicas, tmp_path):
            await both_ready(replicas)
            await replicas.load("run@1", path)
            assert len(replicas._ready) == 1
            assert "`run@1` arrived damaged: the sha256 of `adapter_model.safetensors`" in (
                caplog.text
            )
            assert await sample(replicas, lora="run@1")
            await replicas.unload("run@1")
            await both_ready(replicas)  # the machine joins again when it can load every LoRA


async def test_a_dead_remote_engine_restarts_before_it_serves(
    tmp_path: Path,
) -> None:
    async with head(tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        with node(replicas, tmp_path) as process:
            await both_ready(replicas)
            first = remote_engine_of(replicas)
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            (engine,) = [int(child) for child in listed.split()]
            rollouts = [
                asyncio.create_task(
                    sample(replicas, lora="run@1", n=8, max_tokens=200, temperature=1.0)
                )
                for _ in range(4)
            ]
            await wait_until(lambda: [it.busy for it in replicas._ready] == [16, 16])
            os.kill(engine, signal.SIGKILL)
            assert [len(choices) for choices in await asyncio.gather(*rollouts)] == [8] * 4
            await both_ready(replicas)
            assert remote_engine_of(replicas) is not first and process.poll() is None


async def test_our_own_engine_restarts_while_others_answer(tmp_path: Path) -> None:
    async with head(tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        with node(replicas, tmp_path):
            await both_ready(replicas)
            own = replicas._own.engine
            assert isinstance(own, EmbeddedEngine) and own._worker.pid
            rollouts = [
                asyncio.create_task(
                    sample(replicas, lora="run@1", n=8, max_tokens=200, temperature=1.0)
                )
                for _ in range(4)
            ]
            await wait_until(lambda: [it.busy for it in replicas._ready] == [16, 16])
            os.kill(own._worker.pid, signal.SIGKILL)
            assert [len(choices) for choices in await asyncio.gather(*rollouts)] == [8] * 4
            await both_ready(replicas)


async def test_a_wrong_key_is_rejected_and_only_health_is_public(tmp_path: Path) -> None:
    async with head(tmp_path) as replicas:
        with node(replicas, tmp_path, key="guess") as process:
            code = await asyncio.to_thread(process.wait)
            assert process.stderr
            stderr = process.stderr.read()
        assert code == 1 and "error: The head rejected the key\n\nhint: Set `ART_API_KEY`" in stderr
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{replicas.port}") as client:
            assert (await client.get("/health")).text == "ok\n"
            for path in ("/", "/v1/models", "/metrics"):
                assert (await client.get(path)).status_code == 401
        assert len(replicas._ready) == 1


async def test_a_head_that_stops_ends_the_engines_of_other_machines(tmp_path: Path) -> None:
    async with head(tmp_path) as replicas:
        with node(replicas, tmp_path) as process:
            await both_ready(replicas)
            await replicas.stop()
            assert await asyncio.to_thread(process.wait) == 0


async def test_invalid_messages_remove_only_the_machine_that_sent_them(tmp_path: Path) -> None:
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
