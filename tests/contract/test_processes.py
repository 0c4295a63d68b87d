"""Two learner processes over gloo give the gradients of one."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer.channel import Worker
from trainer.errors import BadRequest, Unsupported

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


async def train(directory: Path, processes: int) -> list[dict[str, Any]]:
    """Two steps in a real worker, with a bad request between them; the rows of both."""
    arguments = ["--base-model", "tiny-random", "--processes", str(processes)]
    worker = Worker("learner", "trainer.learner.worker", arguments, log=directory / "log")
    checkpoints = str(directory / "checkpoints")
    await worker.start()
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
        if processes > 1:
            with pytest.raises(Unsupported):
                await worker.call("prepare", checkpoints=str(directory / "full"), lora=None)
        return rows
    finally:
        await worker.stop()


async def test_two_processes_give_the_gradients_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = await asyncio.gather(train(tmp_path / "one", 1), train(tmp_path / "two", 2))
    assert len(one) == len(two) > 4
    for alone, together in zip(one, two, strict=True):
        for name in alone.keys() - {"checkpoint", "dropped", "times"}:
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    for step in ("0001", "0002"):
        # AdamW's first moment is a sum of gradients.
        expected, found = (
            load_file(tmp_path / run / "checkpoints" / step / "optimizer.safetensors")
            for run in ("one", "two")
        )
        assert expected.keys() == found.keys()
        moments = [name for name in expected if name.startswith("exp_avg.")]
        assert moments
        for name in moments:
            error = (expected[name] - found[name]).norm() / expected[name].norm()
            assert error < 1e-4, name
        assert torch.equal(expected["generator"], found["generator"])
