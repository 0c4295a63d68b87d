"""Two learner processes over gloo, of one machine or of two, give the gradients of one."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.serving import free_port
from trainer.channel import Worker
from trainer.errors import BadRequest, Unsupported
from trainer.learner.peers import Peers

Row = dict[str, Any]
LORA = {"rank": 2, "alpha": 4}
# Three rows a gradient step: the second process has one of its two computed for nothing.
CONFIG = {"packed_sequence_length": 48, "grad_accumulation_sequences": 3, "learning_rate": 1e-3}


def groups() -> list[dict[str, Any]]:
    draw = random.Random(0)

    def trajectory() -> dict[str, Any]:
        exact = {
            "prompt_ids": list(b"What now?"),
            "completion_ids": [draw.randrange(256) for _ in range(7)],
            "logprobs": [-5.5] * 7,
        }
        message = {"role": "assistant", "content": ""}
        choice = {"finish_reason": "stop", "message": message, "art": exact}
        return {"messages_and_choices": [choice], "reward": draw.random()}

    return [{"trajectories": [trajectory() for _ in range(4)]} for _ in range(4)]


async def begin(directory: Path, *arguments: str) -> tuple[Worker, asyncio.Task[None]]:
    """A worker that is starting, with `directory` as its own place."""
    command = ["--base-model", "tiny-random", *arguments]
    worker = Worker("learner", "trainer.learner.worker", command, log=directory / "log")
    directory.mkdir()
    with contextlib.chdir(directory):
        starting = asyncio.create_task(worker.start())
        while worker.pid is None:
            await asyncio.sleep(0.01)
    return worker, starting


async def train(worker: Worker, starting: asyncio.Task[None], *, alone: bool) -> list[Row]:
    """Two steps in a real worker, with a bad request between them; the rows of both."""
    checkpoints = "checkpoints"  # another machine would look for it in its own place
    await starting
    try:
        rows = []
        for _ in range(2):
            stream = worker.stream(
                "train", checkpoints=checkpoints, groups=groups(), config=CONFIG, lora=LORA
            )
            rows += [row async for row in stream]
            bad = [{"trajectories": [{"reward": None}]}]
            with pytest.raises(BadRequest):
                async for _ in worker.stream(
                    "train", checkpoints=checkpoints, groups=bad, config={}, lora=LORA
                ):
                    pass
        if not alone:
            with pytest.raises(Unsupported):
                await worker.call("prepare", checkpoints="full", lora=None)
        return rows
    finally:
        await worker.stop()


async def side_by_side(tmp_path: Path, *arguments: str) -> list[list[Row]]:
    """The same steps in a worker alone, and in one with `arguments`."""
    alone = await begin(tmp_path / "one")
    together = await begin(tmp_path / "two", *arguments)
    return await asyncio.gather(train(*alone, alone=True), train(*together, alone=False))


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
    peers = Peers(tmp_path / "peers.log", devices=None)
    (tmp_path / "elsewhere").mkdir()
    with contextlib.chdir(tmp_path / "elsewhere"):  # where there is no checkpoint
        await peers.join("tiny-random", number=1, nodes=2, master=master)
        while not (tmp_path / "peers.log").exists():
            await asyncio.sleep(0.01)
    try:
        one, two = await side_by_side(tmp_path, "--nodes", "2", "--master", master)
    finally:
        await peers.stop()
    same_gradients(one, two, tmp_path / "one", tmp_path / "two")
    assert "process 1 of 2 has joined" in (tmp_path / "peers.log").read_text()
    assert not any((tmp_path / "elsewhere").iterdir())


def same_gradients(one: list[Row], two: list[Row], alone_in: Path, together_in: Path) -> None:
    assert len(one) == len(two) > 4
    for alone, together in zip(one, two, strict=True):
        for name in alone.keys() - {"checkpoint", "dropped", "times"}:
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    for step in ("0001", "0002"):
        # AdamW's first moment is a sum of gradients.
        expected, found = (
            load_file(run / "checkpoints" / step / "optimizer.safetensors")
            for run in (alone_in, together_in)
        )
        assert expected.keys() == found.keys()
        moments = [name for name in expected if name.startswith("exp_avg.")]
        assert moments
        for name in moments:
            error = (expected[name] - found[name]).norm() / expected[name].norm()
            assert error < 1e-4, name
        assert torch.equal(expected["generator"], found["generator"])
