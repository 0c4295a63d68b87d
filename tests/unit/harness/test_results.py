"""The file of an evaluation holds whatever the agents returned."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.harness.test_hostile_code import Unprintable, endless
from trainer.harness.evaluation.results import Results
from trainer.harness.runner import record
from trainer.harness.types import Example, WorkflowRun


@pytest.mark.parametrize(
    "output", [{"a": [Unprintable()]}, {Unprintable(): 1}, endless(), [10**5000], {"a": {3}}]
)
def test_any_output_is_kept_and_its_run_is_done(output: Any, tmp_path: Path) -> None:
    example = Example("e", "q", "a", {})
    run = WorkflowRun(example, 0, output=output, reward=0.5, metrics={"length": 2.0})
    path = tmp_path / "evals" / "questions.jsonl"
    results = Results(path, {"generations": 1})
    results.add("m", example, [record(run)])
    results.close()
    again = Results(path, {"generations": 1})
    assert again.is_done("m", example, 1)
    (row,) = again.rows("m", [example], 1)
    assert (row["reward"], row["metrics"], row["failure"]) == (0.5, {"length": 2.0}, None)
    again.close()
