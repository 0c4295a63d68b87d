"""Two learner processes over gloo, on one machine or on two, give the gradients of one."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import child, children, environment, listens_at, wait_until_gone
from tests.serving import free_port
from trainer.errors import BadRequest, OutOfMemory, Unsupported, WorkerDied
from trainer.exact_tokens import ExactTokens
from trainer.learner.process import MODULE
from trainer.machines.peers import Peers
from trainer.processes.worker import Worker

Row = dict[str, Any]
LORA = {"rank": 2, "alpha": 4}
# Three rows per gradient step: the second process computes one of its two rows as padding.
CONFIG = {"packed_sequence_length": 48, "grad_accumulation_sequences": 3, "learning_rate": 1e-3}


def groups() -> list[dict[str, Any]]:
    draw = random.Random(0)

    def trajectory() -> dict[str, Any]:
        message = {"role": "assistant", "content": ""}
        choice = {"finish_reason": "stop", "message": message}
        ids = [draw.randrange(256) for _ in range(7)]
        ExactTokens(list(b"What now?"), ids, [-5.5] * 7).put(choice)
        return {"messages_and_choices": [choice], "reward": draw.random()}

    return [{"trajectories": [trajectory() for _ in range(4)]} for _ in range(4)]


def written(worker: Worker, groups: list[Any]) -> str:
    """The file of a request with these groups, beside the worker's directory."""
    path = worker.log.parent.with_suffix(".json")
    path.write_text(json.dumps({"groups": groups}))
    return str(path)


async def start_worker(directory: Path, *arguments: str) -> tuple[Worker, asyncio.Task[None]]:
    """Start a worker with `directory` as its working directory; return its startup task too."""
    command = ["--base-model", "tiny-random", *arguments]
    worker = Worker("learner", MODULE, command, log=directory / "log")
    directory.mkdir()
    with contextlib.chdir(directory):
        starting = asyncio.create_task(worker.start())
        while worker.pid is None:
            await asyncio.sleep(0.01)
    return worker, starting


async def train(
    worker: Worker, starting: asyncio.Task[None], agents: Sequence[int] | None = None
) -> list[Row]:
    """Train two steps in a real worker, each followed by a bad request; return all rows.

    `agents` are the torchrun agents of the other machines; None if the worker is a single process.
    """
    checkpoints = "checkpoints"  # relative to each machine's working directory
    try:
        await starting
        rows = []
        for _ in range(2):
            step = {"request": written(worker, groups()), "lora": LORA}
            stream = worker.stream("train", checkpoints=checkpoints, config=CONFIG, **step)
            rows += [row async for row in stream]
            assert await worker.call("release") is None
            step["request"] = written(worker, [{"trajectories": [{"reward": None}]}])
            with pytest.raises(BadRequest):
                async for _ in worker.stream("train", checkpoints=checkpoints, config={}, **step):
                    pass
        if agents is not None:
            assert worker.pid
            assert_torchrun_world([worker.pid, *agents])
            with pytest.raises(Unsupported):
                await worker.call("prepare", checkpoints="full", lora=None)
        return rows
    finally:
        await worker.stop()


def assert_torchrun_world(agents: Sequence[int]) -> None:
    """Check that each agent started its processes of one world, which listens only on loopback."""
    ranks = [rank for agent in agents for rank in children(agent)]
    environments = [environment(rank) for rank in ranks]
    assert [place["RANK"] for place in environments] == ["0", "1"]
    shared = ["TORCHELASTIC_RUN_ID", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    worlds = [[place[name] for name in shared] for place in environments]
    assert worlds[0] == worlds[1]
    assert worlds[0][:4] == ["learner", "2", str(len(agents)), "127.0.0.1"]
    addresses = set().union(*(listens_at(pid) for pid in [*agents, *ranks]))
    assert addresses == {"127.0.0.1"}


async def train_alone_and_together(
    tmp_path: Path, *arguments: str, agents: Sequence[int] = ()
) -> list[list[Row]]:
    """Train the same steps in a single-process worker and in one with `arguments`."""
    alone = await start_worker(tmp_path / "one")
    together = await start_worker(tmp_path / "two", *arguments)
    return await asyncio.gather(train(*alone), train(*together, agents))


async def test_two_processes_give_the_gradients_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = await train_alone_and_together(tmp_path, "--processes", "2")
    assert_same_gradients(one, two, tmp_path / "one", tmp_path / "two")


async def test_two_machines_give_the_gradients_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    master = f"127.0.0.1:{free_port()}"
    peers = Peers(tmp_path / "peers.log")
    (tmp_path / "elsewhere").mkdir()
    with contextlib.chdir(tmp_path / "elsewhere"):  # has no checkpoints
        await peers.join("tiny-random", None, number=1, nodes=2, master=master)
        while not (tmp_path / "peers.log").exists():
            await asyncio.sleep(0.01)
    try:
        agent = child(os.getpid(), MODULE)
        world = ("--nodes", "2", "--master", master)
        one, two = await train_alone_and_together(tmp_path, *world, agents=[agent])
    finally:
        await peers.stop()
    assert_same_gradients(one, two, tmp_path / "one", tmp_path / "two")
    assert "process 1 of 2 has joined" in (tmp_path / "peers.log").read_text()
    assert not any((tmp_path / "elsewhere").iterdir())


OUT_OF_MEMORY_IN_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    from trainer.errors import OutOfMemory
    from trainer.learner.learner import Learner

    def train(*_, **__):
        raise OutOfMemory("The step does not fit the GPU")

    def exit_late(code):  # after the other process has seen the lost connection, and exited
        import time, torch.distributed
        torch.distributed.destroy_process_group()
        time.sleep(3)
        leave(code)

    Learner.train = train
    leave, os._exit = os._exit, exit_late
"""


async def test_one_process_out_of_memory_is_reported_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY_IN_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker, starting = await start_worker(tmp_path / "two", "--processes", "2")
    try:
        await starting
        request = written(worker, groups())
        stream = worker.stream(
            "train", checkpoints="checkpoints", request=request, config=CONFIG, lora=LORA
        )
        with pytest.raises(OutOfMemory, match="learner ran out of GPU memory"):
            async for _ in stream:
                pass
    finally:
        await worker.stop()


async def test_a_killed_process_ends_all_others_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker, starting = await start_worker(tmp_path / "two", "--processes", "2")
    try:
        await starting
        assert worker.pid
        ranks = children(worker.pid)
        os.kill(ranks[1], signal.SIGKILL)
        while worker.running:
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerDied, match="Process 1 of the learner was killed by `SIGKILL`"):
            await worker.call("ready")
        wait_until_gone(ranks)
        assert await worker.revive()
        ranks = children(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)  # the agent itself
        wait_until_gone(ranks)
    finally:
        await worker.stop()


def assert_same_gradients(
    one: list[Row], two: list[Row], alone_in: Path, together_in: Path
) -> None:
    assert len(one) == len(two) > 4
    for alone, together in zip(one, two, strict=True):
        for name in alone.keys() - {"checkpoint", "dropped", "times"}:
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    for step in ("0001", "0002"):
        # AdamW's first moment is a weighted sum of gradients.
        expected, found = (
            load_file(run / "checkpoints" / step / "optimizer.exp_avg.safetensors")
            for run in (alone_in, together_in)
        )
        assert expected.keys() == found.keys()
        moments = [name for name in expected if name.startswith("exp_avg.")]
        assert moments
        for name in moments:
            error = (expected[name] - found[name]).norm() / expected[name].norm()
            assert error < 1e-4, name
        assert torch.equal(expected["generator"], found["generator"])
