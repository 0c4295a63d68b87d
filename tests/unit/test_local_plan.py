"""What `./launch-cluster.sh --local` runs on a given machine."""

from pathlib import Path

import pytest

from examples.temporal_clue.local import plan
from examples.temporal_clue.quickstart import SIZES, _command, guessing_accuracy, main
from trainer.base_model.smollm2 import NAME
from trainer.config import ServerConfig
from trainer.engines import choose

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("card", "vllm", "task"),
    [
        (False, None, "art-cpu.yaml"),
        (True, None, "art-cpu.yaml"),
        (False, "elsewhere/bin/python", "art-cpu.yaml"),
        (True, "elsewhere/bin/python", "art-local.yaml"),
    ],
)
def test_a_gpu_with_vllm_gets_the_large_model(
    card: bool, vllm: str | None, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_cuda", lambda: card)
    monkeypatch.setattr(choose, "_is_installed", lambda name: False)
    chosen = plan(ServerConfig(vllm=vllm))
    assert chosen.task.name == task and (ROOT / chosen.task).is_file()
    # With a GPU, the model of the task or of `.env`. Without one, always SmolLM2.
    assert chosen.envs == ({} if task == "art-local.yaml" else {"BASE_MODEL": NAME})
    assert chosen.size in SIZES


@pytest.mark.parametrize(("size", "share"), [("tiny", 1 / 3), ("small", 3 / 8)])
def test_guessing_accuracy_follows_from_the_options_of_the_validation_puzzles(
    size: str, share: float
) -> None:
    config, validation = SIZES[size]
    example = ROOT / "examples" / "temporal_clue"
    assert (example / config).is_file()
    assert guessing_accuracy(example / "data" / validation) == pytest.approx(share)


def test_the_command_to_train_longer_repeats_the_users_options() -> None:
    context = main.make_context("quickstart", ["--openai-port", "18000", "--epochs", "3"])
    assert _command(context) == "python -m examples.temporal_clue.quickstart --openai-port 18000"
