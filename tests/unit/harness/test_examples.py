"""Every finetuning config that we ship loads, and names files and functions that exist."""

from pathlib import Path

import pytest

from trainer.harness.components import JsonDataset, PythonWorkflow
from trainer.harness.config import load_config
from trainer.harness.dataset import load_examples
from trainer.harness.user_code import load

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "examples" / "temporal_clue").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_loads_with_what_it_names(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert isinstance(config.workflow, PythonWorkflow) and callable(load(config.workflow.function))
    dataset = config.eval.general.dataset
    assert isinstance(dataset, JsonDataset)
    assert len(load_examples(dataset)) == {"config.yaml": 144, "gpu.yaml": 96}[path.name]
