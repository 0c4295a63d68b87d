"""The notebook of Temporal Clue, executed against a server with SmolLM2."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serving import Serving
from trainer.base_model.smollm2 import NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("smollm2")
    with Serving(directory, NAME, ART_CACHE=art_cache) as serving:
        yield serving


def ports(serving: Serving) -> tuple[str, str]:
    return str(urlsplit(serving.control).port), str(urlsplit(serving.openai).port)


@pytest.mark.timeout(2400)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    smollm2: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient
    import nbformat

    rows = (ROOT / "examples/temporal_clue/data/validation.jsonl").read_text().splitlines()
    (tmp_path / "some.jsonl").write_text("\n".join(rows[:4]))
    control, openai = ports(smollm2)
    settings: dict[str, Any] = {
        "ART_PORT": control,
        "ART_OPENAI_PORT": openai,
        "TEMPORAL_CLUE_EPOCHS": "1",
        "TEMPORAL_CLUE_OUTPUT": tmp_path / "output",
        "TEMPORAL_CLUE_VALIDATION": tmp_path / "some.jsonl",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    notebook = nbformat.read(ROOT / "examples/temporal-clue.ipynb", as_version=4)
    path = {"metadata": {"path": str(ROOT)}}
    patience = {"timeout": 2000, "startup_timeout": 300, "iopub_timeout": 60}
    nbclient.NotebookClient(notebook, resources=path, **patience).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "validation reward: 0." in text and "--- expected" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    history = json.loads((tmp_path / "output" / "reward_history.json").read_text())
    assert [row["epoch"] for row in history] == [1]
