"""Runs are written whatever the agent returned."""

import math
from pathlib import Path

from trainer.harness.metrics import read_jsonl, write_jsonl


def test_an_output_that_is_not_json_is_written_as_text(tmp_path: Path) -> None:
    odd = {"answer": None, "error": ValueError("no such tool"), ("a", 1): {3}, "score": math.nan}
    write_jsonl(tmp_path / "runs.jsonl", [{"output": odd}])
    (row,) = read_jsonl(tmp_path / "runs.jsonl")
    written = {"answer": None, "error": "no such tool", "('a', 1)": "{3}", "score": None}
    assert row["output"] == written
