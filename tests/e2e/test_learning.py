"""The learner learns: a toy reward rises on a random model. `test_local` trains a pretrained one.

Sampling is as simple as possible and needs no engine process, so that only the learner is tested.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.engines.decoder import Decoder
from trainer.exact_tokens import ExactTokens
from trainer.learner.learner import Learner
from trainer.policy.device import default_dtype
from trainer.policy.model import lora_state
from trainer.step_config import GrpoConfig

logger = logging.getLogger(__name__)
GROUP = 8
Reward = Callable[[str], float]


def learner(base_model: str) -> Learner:
    directory, device = resolve(base_model), torch.device("cpu")
    return Learner(base_model, directory, dtype=default_dtype(directory, device), device=device)


@torch.no_grad()
def sample_group(
    one: Learner, prompt: str, reward: Reward, *, length: int, generator: torch.Generator
) -> dict[str, Any]:
    """GROUP completions of `length` tokens with their exact ids, logprobs and rewards."""
    assert one.state is not None
    policy = one.state.policy
    decoder = Decoder(policy)
    decoder.use_lora(policy.lora, lora_state(policy))
    messages = [{"role": "user", "content": prompt}]
    prompt_ids = one.tokenizer.apply_chat_template(messages)
    cache = decoder.new_cache(GROUP, len(prompt_ids) + length)
    logits = decoder.prefill([prompt_ids] * GROUP, list(range(GROUP)), cache)
    chosen, found = [], []
    for at in range(len(prompt_ids), len(prompt_ids) + length):
        logprobs = logits.float().log_softmax(-1)
        chosen.append(torch.multinomial(logprobs.exp(), 1, generator=generator))
        found.append(logprobs.gather(1, chosen[-1]))
        logits = decoder.decode(chosen[-1][:, 0].tolist(), [at] * GROUP, cache)
    trajectories = []
    for ids, logprobs_of in zip(
        torch.cat(chosen, 1).tolist(), torch.cat(found, 1).tolist(), strict=True
    ):
        text = one.tokenizer.decode(ids)
        message = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"finish_reason": "length", "message": message}
        ExactTokens(prompt_ids, ids, logprobs_of).put(choice)
        trajectories.append({"messages_and_choices": [*messages, choice], "reward": reward(text)})
    return {"trajectories": trajectories}


def learn(
    one: Learner,
    at: Path,
    prompts: list[str],
    reward: Reward,
    *,
    steps: int,
    learning_rate: float,
    length: int = 12,
    seed: int = 1,
) -> list[float]:
    """The mean reward of every step's samples, drawn before that step is trained."""
    lora = LoraConfig(seed=seed)
    config = GrpoConfig(
        learning_rate=learning_rate, max_grad_norm=1.0, grad_accumulation_sequences=16
    )
    generator = torch.Generator().manual_seed(seed)
    one.prepare(at, lora)
    means = []
    for _ in range(steps):
        groups = [
            sample_group(one, prompt, reward, length=length, generator=generator)
            for prompt in prompts
        ]
        rewards = [one["reward"] for group in groups for one in group["trajectories"]]
        means.append(sum(rewards) / len(rewards))
        first, *_ = one.train(at, groups, config, lora)
        # The learner trains on the sampled tokens, so its logprobs equal the sampler's.
        assert first["loss/sampler_gap"] < 0.1
    return means


def share(text: str, letters: str) -> float:
    return sum(letter in letters for letter in text) / max(len(text), 1)


def test_a_random_model_learns_to_write_small_letters(tmp_path: Path) -> None:
    means = learn(
        learner("tiny-random"),
        tmp_path,
        ["one", "two"],
        lambda text: share(text, "abcdefghijklmnopqrstuvwxyz"),
        steps=25,
        learning_rate=3e-3,
    )
    logger.info("tiny-random: %s", " ".join(f"{mean:.2f}" for mean in means))
    start, end = sum(means[:3]) / 3, sum(means[-3:]) / 3
    assert start < 0.25
    assert end > 0.45


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
