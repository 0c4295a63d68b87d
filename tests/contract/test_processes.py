"""Two learner processes over gloo, of one machine or of two, give the gradients of one."""

import asyncio
import contextlib
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
# Three rows a gradient step: the second process has one of its two computed for nothing.
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


async def begin(directory: Path, *arguments: str) -> tuple[Worker, asyncio.Task[None]]:
    """A worker that is starting, with `directory` as its own place."""
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
    """Two steps in a real worker, with a bad request between them; the rows of both.

    One that is not alone has a world to look at; `agents` are those of its other machines.
    """
    checkpoints = "checkpoints"  # another machine would look for it in its own place
    try:
        await starting
        rows = []
        for _ in range(2):
            stream = worker.stream(
                "train", checkpoints=checkpoints, groups=groups(), config=CONFIG, lora=LORA
            )
            rows += [row async for row in stream]
            assert await worker.call("release") is None
            bad = [{"trajectories": [{"reward": None}]}]
            with pytest.raises(BadRequest):
                async for _ in worker.stream(
                    "train", checkpoints=checkpoints, groups=bad, config={}, lora=LORA
                ):
                    pass
        if agents is not None:
            assert worker.pid
            is_torchruns_world([worker.pid, *agents])
            with pytest.raises(Unsupported):
                await worker.call("prepare", checkpoints="full", lora=None)
        return rows
    finally:
        await worker.stop()


def is_torchruns_world(agents: Sequence[int]) -> None:
    """Each agent of torchrun started its part of one world, which listens on loopback alone."""
    ranks = [rank for agent in agents for rank in children(agent)]
    places = [environment(rank) for rank in ranks]
    assert [place["RANK"] for place in places] == ["0", "1"]
    shared = ["TORCHELASTIC_RUN_ID", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    worlds = [[place[name] for name in shared] for place in places]
    assert worlds[0] == worlds[1]
    assert worlds[0][:4] == ["learner", "2", str(len(agents)), "127.0.0.1"]
    heard = set().union(*(listens_at(pid) for pid in [*agents, *ranks]))
    assert heard == {"127.0.0.1"}


async def side_by_side(
    tmp_path: Path, *arguments: str, agents: Sequence[int] = ()
) -> list[list[Row]]:
    """The same steps in a worker alone, and in one with `arguments`."""
    alone = await begin(tmp_path / "one")
    together = await begin(tmp_path / "two", *arguments)
    return await asyncio.gather(train(*alone), train(*together, agents))


async def test_two_processes_give_the_gradients_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = await side_by_side(tmp_path, "--processes", "2")
    same_gradients(one, two, tmp_path / "one", tmp_path / "two")


async def test_two_machines_give_the_gradients_of_one_that_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    master = f"127.0.0.1:{free_port()}"
    peers = Peers(tmp_path / "peers.log")
    (tmp_path / "elsewhere").mkdir()
    with contextlib.chdir(tmp_path / "elsewhere"):  # where there is no checkpoint
        await peers.join("tiny-random", None, number=1, nodes=2, master=master)
        while not (tmp_path / "peers.log").exists():
            await asyncio.sleep(0.01)
    try:
        agent = child(os.getpid(), MODULE)
        world = ("--nodes", "2", "--master", master)
        one, two = await side_by_side(tmp_path, *world, agents=[agent])
    finally:
        await peers.stop()
    same_gradients(one, two, tmp_path / "one", tmp_path / "two")
    assert "process 1 of 2 has joined" in (tmp_path / "peers.log").read_text()
    assert not any((tmp_path / "elsewhere").iterdir())


CROWDED = """
import os
if os.environ.get("RANK") == "1":
    from trainer.errors import OutOfMemory
    from trainer.learner.learner import Learner

    def train(*_):
        raise OutOfMemory("The step does not fit the GPU")

    Learner.train = train
"""


async def test_one_process_without_room_is_the_worlds_lack_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CROWDED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker, starting = await begin(tmp_path / "two", "--processes", "2")
    try:
        await starting
        stream = worker.stream(
            "train", checkpoints="checkpoints", groups=groups(), config=CONFIG, lora=LORA
        )
        with pytest.raises(OutOfMemory, match="learner ran out of GPU memory"):
            async for _ in stream:
                pass
    finally:
        await worker.stop()


async def test_a_lost_process_takes_its_world_with_it_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker, starting = await begin(tmp_path / "two", "--processes", "2")
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


def same_gradients(one: list[Row], two: list[Row], alone_in: Path, together_in: Path) -> None:
    assert len(one) == len(two) > 4
    for alone, together in zip(one, two, strict=True):
        for name in alone.keys() - {"checkpoint", "dropped", "times"}:
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    for step in ("0001", "0002"):
        # AdamW's first moment is a sum of gradients.
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
