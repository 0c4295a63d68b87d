"""Every shipped finetuning config loads, and its files and functions exist."""

from pathlib import Path

import pytest

from trainer.harness.components import FileDatasetConfig
from trainer.harness.config_file import load_config
from trainer.harness.dataset import load_examples
from trainer.harness.user_code import import_object
from trainer.harness.workflow_config import PythonWorkflowConfig

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "examples" / "temporal_clue").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_loads_with_its_function_and_dataset(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert isinstance(config.workflow, PythonWorkflowConfig)
    assert callable(import_object(config.workflow.function))
    dataset = config.eval.general.dataset
    assert isinstance(dataset, FileDatasetConfig)
    assert len(load_examples(dataset)) == {"config.yaml": 144, "gpu.yaml": 96}[path.name]
