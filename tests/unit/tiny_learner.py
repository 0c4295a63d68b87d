"""A learner of tiny-random, and made-up groups to train on."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kit.manifest import sha256
from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.learner import state
from trainer.learner.learner import Learner
from trainer.step_config import GrpoConfig

LORA = LoraConfig(rank=2, alpha=4)
END = 258


def learner(base_model: str = "tiny-random") -> Learner:
    return Learner(
        base_model, resolve("tiny-random"), dtype=torch.float32, device=torch.device("cpu")
    )


def trajectory(draw: random.Random, reward: float) -> dict[str, Any]:
    ids = [*(draw.randrange(97, 123) for _ in range(6)), END]
    tokens = [{"token": f"token_id:{one}", "logprob": -5.5, "top_logprobs": []} for one in ids]
    choice = {
        "finish_reason": "stop",
        "index": 0,
        "logprobs": {"content": tokens},
        "message": {"role": "assistant", "content": bytes(ids[:-1]).decode()},
    }
    question = {"role": "user", "content": "?"}
    return {"messages_and_choices": [question, choice], "tools": None, "reward": reward}


def groups(seed: int, count: int = 2) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"trajectories": [trajectory(draw, draw.random()) for _ in range(3)]} for _ in range(count)
    ]


def train(
    one: Learner,
    at: Path,
    given: list[dict[str, Any]],
    lora: LoraConfig | None = LORA,
    **config: Any,
) -> list[dict[str, Any]]:
    settings = {"packed_sequence_length": 96, "learning_rate": 1e-3, **config}
    return list(one.train(at, given, GrpoConfig(**settings), lora))


def files(at: Path, step: int) -> dict[str, str]:
    path = checkpoint.path_of(at, step)
    names = (state.ADAPTER, *map(state.OPTIMIZER.format, state.MOMENTS))
    return {name: sha256(path / name) for name in names}


def adapter(at: Path, step: int = 1) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.path_of(at, step) / state.ADAPTER)


def uneven_groups() -> list[dict[str, Any]]:
    """Groups whose trajectories differ in length, so that every kind of mean differs."""
    given = groups(0, 3)
    given[0]["trajectories"][0]["messages_and_choices"][1]["logprobs"]["content"].pop(0)
    given[1]["trajectories"][0]["messages_and_choices"][0]["content"] = "?" * 9
    return given
