"""What is compiled ahead of the first step is what the first step needs."""

from typing import Any

import pytest
import torch

from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.learner import warm_up
from trainer.learner.gradient import row_logprobs
from trainer.policy.compiled import CompiledLayers
from trainer.policy.model import load_model
from trainer.policy.tree_paths import tree_paths

# Tracing imports modules of torch that emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
LORA = LoraConfig(rank=4)
FORM: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_the_first_step_compiles_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(warm_up, "LENGTHS", (2048,))
    directory = resolve("tiny-random")
    warm_up.warm_up(directory, LORA, **FORM, backend=backend)  # type: ignore[arg-type]
    assert compiled
    ahead = len(compiled)
    policy = load_model(directory, lora=LORA, **FORM)
    assert policy.architecture.layers > 1
    policy.compiled = CompiledLayers(policy.layers, policy.architecture, backend=backend)  # type: ignore[arg-type]
    for row in warm_up.rows(1024):  # padded to the same length
        row_logprobs(policy, row)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert len(compiled) == ahead


def test_rows_for_each_kind_of_attention() -> None:
    rows = little, much, nothing = warm_up.rows(4096)
    assert {row.capacity for row in rows} == {4096}
    assert not little.separate and not much.separate and len(nothing.separate) == 2
    counts = [tree_paths(row.ends, 4096).counts.tolist() for row in rows]
    assert counts == [[4, 4096 + 2 * 64], [0, 0], [3, 4096]]
