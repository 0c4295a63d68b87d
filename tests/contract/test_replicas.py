"""Engines on other machines: actors of a real Ray cluster on loopback."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kit.manifest import write_manifest
from tests.contract.loras import write_lora
from tests.contract.nodes import engines_of, ready, wait_until
from tests.processes import wait_until_gone
from tests.ray_cluster import ACTOR, ENGINE, RayHosts
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Delta, SampleRequest
from trainer.machines.remote_engine import RemoteEngine
from trainer.machines.replicas import Replicas

PROMPT = [256, 257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]


@pytest.fixture
def hosts(ray_hosts: RayHosts) -> RayHosts:
    return ray_hosts


@pytest.fixture
def other(hosts: RayHosts) -> str:
    """The address of the machine that every test has."""
    return hosts.address.rpartition(":")[0][:-1] + "2"


def remote_engine_of(replicas: Replicas) -> RemoteEngine:
    (engine,) = [it.engine for it in replicas._ready if isinstance(it.engine, RemoteEngine)]
    return engine


async def sample(replicas: Replicas, **request: Any) -> list[Delta]:
    request = {"prompt_ids": PROMPT, "max_tokens": 4, "temperature": 0, **request}
    return [delta async for delta in replicas.sample(SampleRequest(**request))]


def roll_out(replicas: Replicas) -> list[asyncio.Task[list[Delta]]]:
    long = {"lora": "run@1", "n": 4, "max_tokens": 400, "temperature": 1.0}
    return [asyncio.create_task(sample(replicas, **long)) for _ in range(8)]


async def all_finish(rollouts: list[asyncio.Task[list[Delta]]]) -> None:
    results = await asyncio.gather(*rollouts)
    assert [len(choices) for choices in results] == [4] * 8
    assert all(choice.finish_reason for choices in results for choice in choices)


async def test_requests_are_balanced_and_survive_a_killed_actor(
    hosts: RayHosts, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines_of(hosts, tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        expected = await sample(replicas, lora="run@1")
        await ready(replicas)
        rollouts = roll_out(replicas)
        await wait_until(lambda: [it.busy for it in replicas._ready] == [16, 16])
        os.kill(hosts.pid(other, ACTOR), signal.SIGKILL)
        await all_finish(rollouts)
        assert "is lost with 16 choices under way" in caplog.text
        # Ray starts it again with nothing loaded, and it is ready only with every served LoRA.
        await replicas.load("run@2", write_lora(tmp_path / "0002", seed=2))
        await ready(replicas)
        engine = remote_engine_of(replicas)
        assert engine._held == {"run@1", "run@2"}
        request = SampleRequest(PROMPT, lora="run@1", max_tokens=4, temperature=0)
        (remote,) = [delta async for delta in engine.sample(request)]
        assert remote.token_ids == expected[0].token_ids
        assert remote.logprobs == pytest.approx(expected[0].logprobs, abs=1e-4)


async def test_a_damaged_lora_is_rejected_there_and_still_served_here(
    hosts: RayHosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lora(tmp_path / "0001", seed=1)
    write_manifest(path, {"step": 1})
    weights = path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    async with engines_of(hosts, tmp_path) as replicas:
        await ready(replicas)
        await replicas.load("run@1", path)
        assert len(replicas._ready) == 1
        damage = "`run@1` arrived damaged: the sha256 of `adapter_model.safetensors` is not"
        assert damage in caplog.text
        assert await sample(replicas, lora="run@1")
        await replicas.unload("run@1")
        await ready(replicas)  # the machine joins again when it can load every LoRA


@pytest.mark.parametrize("where", ["there", "here"])
async def test_a_dead_engine_restarts_while_the_other_one_answers(
    hosts: RayHosts, other: str, tmp_path: Path, where: str
) -> None:
    async with engines_of(hosts, tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        await ready(replicas)
        first = remote_engine_of(replicas)
        own = replicas._own.engine
        assert isinstance(own, EmbeddedEngine) and own._worker.pid
        actor = hosts.pid(other, ACTOR)
        rollouts = roll_out(replicas)
        await wait_until(lambda: [it.busy for it in replicas._ready] == [16, 16])
        os.kill(own._worker.pid if where == "here" else hosts.pid(other, ENGINE), signal.SIGKILL)
        await all_finish(rollouts)
        await ready(replicas)
        assert (remote_engine_of(replicas) is first) == (where == "here")
        assert hosts.pid(other, ACTOR) == actor


async def test_machines_join_and_leave_while_requests_run(
    hosts: RayHosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines_of(hosts, tmp_path) as replicas:
        await replicas.load("run@1", write_lora(tmp_path / "0001", seed=1))
        await ready(replicas)
        rollouts = roll_out(replicas)
        added = await asyncio.to_thread(hosts.join, 3)
        await ready(replicas, 3)
        await all_finish(rollouts)
        rollouts = roll_out(replicas)
        await wait_until(lambda: all(it.busy for it in replicas._ready))
        hosts.leave(added)
        await all_finish(rollouts)
        await wait_until(lambda: "has left the cluster" in caplog.text)
        assert len(replicas._ready) == 2


async def test_a_server_that_stops_ends_the_engines_of_other_machines(
    hosts: RayHosts, other: str, tmp_path: Path
) -> None:
    async with engines_of(hosts, tmp_path) as replicas:
        await ready(replicas)
        pids = [hosts.pid(other, name) for name in (ACTOR, ENGINE)]
        await replicas.stop()
        wait_until_gone(pids)
