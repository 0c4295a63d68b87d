"""What `./launch-cluster.sh --local` makes of a machine."""

from pathlib import Path

import pytest

from examples.temporal_clue.local import plan
from examples.temporal_clue.quickstart import SIZES, _command, chance, main
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
def test_a_card_and_vllm_make_it_a_real_model(
    card: bool, vllm: str | None, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_cuda", lambda: card)
    monkeypatch.setattr(choose, "_is_installed", lambda name: False)
    made = plan(ServerConfig(vllm=vllm))
    assert made.task.name == task and (ROOT / made.task).is_file()
    # The task's own model, or that of `.env`, on a card; the example's own without one.
    assert made.envs == ({} if task == "art-local.yaml" else {"BASE_MODEL": NAME})
    assert made.size in SIZES


@pytest.mark.parametrize(("size", "share"), [("tiny", 1 / 3), ("small", 3 / 8)])
def test_chance_is_that_of_the_puzzles_that_measure(size: str, share: float) -> None:
    config, validation = SIZES[size]
    example = ROOT / "examples" / "temporal_clue"
    assert (example / config).is_file()
    assert chance(example / "data" / validation) == pytest.approx(share)


def test_the_command_that_trains_longer_is_the_one_that_was_typed() -> None:
    context = main.make_context("quickstart", ["--openai-port", "18000", "--epochs", "3"])
    assert _command(context) == "python -m examples.temporal_clue.quickstart --openai-port 18000"
