"""Exports in GGUF, loaded by llama.cpp itself: its logprobs, tokens and chats against ours."""

import contextlib
import json
import logging
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.environments import CLIENTS, client_environment, python_of
from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.base_model.smollm2 import NAME as SMOLLM2
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.export import Form, export
from trainer.export.merge import lora_tensors
from trainer.learner.learner import Learner
from trainer.policy.lora import load_lora
from trainer.policy.model import Policy, load_model
from trainer.step_config import GrpoConfig

logger = logging.getLogger(__name__)
LORA = LoraConfig(rank=8, alpha=16)
TOKENS = 200
QUESTION = [{"role": "user", "content": "Tell me a long story about 2 cats and 37 dogs in Zürich."}]
SAMPLING = {"temperature": 1.0, "samplers": ["temperature"], "seed": 7, "ignore_eos": True}


@contextlib.contextmanager
def llama_server(model: Path, *loras: Path) -> Iterator[httpx.Client]:
    """llama.cpp's server over a GGUF file."""
    python = python_of("llama-cpp", ours=False)
    command = [python, CLIENTS / "llama_server.py", model, *loras]
    with subprocess.Popen(
        command,
        env=client_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin and process.stdout
        try:
            with httpx.Client(base_url=json.loads(process.stdout.readline()), timeout=300) as it:
                yield it
        finally:
            process.stdin.close()
            process.wait(60)


def trajectory(tokenizer: Tokenizer, draw: random.Random) -> dict[str, Any]:
    """A made-up answer of SmolLM2 with a made-up reward."""
    ids = [*(draw.randrange(1000, 9000) for _ in range(12)), 2]
    content = [{"token": f"token_id:{one}", "logprob": -9.0, "top_logprobs": []} for one in ids]
    choice = {
        "finish_reason": "stop",
        "index": 0,
        "logprobs": {"content": content},
        "message": {"role": "assistant", "content": tokenizer.text(ids)},
    }
    return {"messages_and_choices": [*QUESTION, choice], "tools": None, "reward": draw.random()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Path]:
    """A checkpoint of SmolLM2 after two real steps, which moved it far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        base = resolve(SMOLLM2)
        learner = Learner(SMOLLM2, base, dtype=torch.float32, device=torch.device("cpu"))
        draw, tokenizer = random.Random(1), Tokenizer(base)
        at = tmp_path_factory.mktemp("run") / "demo" / "models" / "cats" / "checkpoints"
        config = GrpoConfig(packed_sequence_length=256, learning_rate=1e-3)
        for _ in range(2):
            groups = [{"trajectories": [trajectory(tokenizer, draw) for _ in range(3)]}]
            list(learner.train(at, groups, config, LORA))
        yield checkpoint.path_of(at, 2)


@pytest.fixture(scope="module")
def policy(trained: Path, art_cache: str) -> Policy:
    """Our model with the trained LoRA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        one = load_model(
            resolve(SMOLLM2), lora=LORA, dtype=torch.float32, device=torch.device("cpu")
        )
    load_lora(one, lora_tensors(trained))
    return one


@torch.no_grad()
def logprobs_of(policy: Policy, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logits = policy.logits(policy.hidden(ids))[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@dataclass(frozen=True)
class Answer:
    """200 tokens that llama.cpp sampled, with its logprobs."""

    prompt: list[int]
    ids: list[int]
    logprobs: torch.Tensor

    @classmethod
    def of(cls, server: httpx.Client) -> "Answer":
        prompt = Tokenizer(resolve(SMOLLM2)).apply_chat_template(QUESTION)
        body = {"prompt": prompt, "n_predict": TOKENS, "n_probs": 1, **SAMPLING}
        found: list[Any] = []
        # llama.cpp leaves out the parts of a character, and which seed has none depends on the CPU.
        for seed in range(7, 17):
            answer = server.post("/completion", json={**body, "seed": seed}).raise_for_status()
            found = answer.json()["completion_probabilities"]
            if len(found) == TOKENS:
                break
        assert len(found) == TOKENS
        logprobs = torch.tensor([token["logprob"] for token in found])
        return cls(prompt, [token["id"] for token in found], logprobs)

    def difference(self, policy: Policy) -> float:
        """The largest difference from our logprobs of the same tokens."""
        ours = logprobs_of(policy, self.prompt, self.ids)
        found = (ours - self.logprobs).abs().max().item()
        logger.info("largest difference: %.4f", found)
        return found


@pytest.mark.parametrize(("kind", "limit"), [("f16", 0.02), ("q8_0", 0.5)])
def test_llama_cpp_answers_with_our_logprobs(
    kind: str, limit: float, trained: Path, policy: Policy, tmp_path: Path
) -> None:
    output = export(trained, tmp_path / "cats", form=Form(gguf=kind))
    with llama_server(output / f"cats-{kind.upper()}.gguf") as server:
        answer = Answer.of(server)
        assert answer.difference(policy) < limit
        if kind == "f16":
            policy.set_lora_enabled(False)
            assert answer.difference(policy) > 0.1  # the training shows
            policy.set_lora_enabled(True)
            assert_same_tokens(server, Tokenizer(resolve(SMOLLM2)))


def test_a_lora_on_the_base_models_file_answers_with_our_logprobs(
    trained: Path, policy: Policy, tmp_path: Path
) -> None:
    untrained = checkpoint.path_of(trained.parent, 0)
    base = export(untrained, tmp_path / "base", form=Form(gguf="f16")) / "base-F16.gguf"
    lora = export(trained, tmp_path / "cats", form=Form(lora=True, gguf="f16"))
    with llama_server(base, lora / "cats-LoRA-F16.gguf") as server:
        assert Answer.of(server).difference(policy) < 0.02


def assert_same_tokens(server: httpx.Client, tokenizer: Tokenizer) -> None:
    """llama.cpp renders chats and splits texts as we do."""
    rendered = server.post("/apply-template", json={"messages": QUESTION}).json()["prompt"]
    assert rendered == tokenizer.render(QUESTION)
    for text in (rendered, "In 1492,  it's\n\n\tnaïve: 東京 🦙 3.14!", "def f(x):\n    return x"):
        body = {"content": text, "parse_special": True, "add_special": True}
        assert server.post("/tokenize", json=body).json()["tokens"] == tokenizer.encode(text)
