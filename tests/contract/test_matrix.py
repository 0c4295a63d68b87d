"""Unmodified frameworks, each by its base URL alone; and six of them train what they sampled.

With `WRITE_TABLE=1` the table in `docs/frameworks.md` is written instead of compared.
"""

import json
import os
import sqlite3
import time
from array import array
from collections.abc import Iterator

import httpx
import pytest

from tests.contract.frameworks import matrix as frameworks
from tests.contract.frameworks.matrix import COLUMNS, FRAMEWORKS, MODEL, Framework, Matrix
from tests.serving import Serving
from trainer.base_model.tokenizer import Tokenizer
from trainer.client import trajectory
from trainer.learner.tokenize import tokenize_trajectory

ENVIRONMENTS = list(dict.fromkeys(framework.environment for framework in FRAMEWORKS))
# Over Responses, over Messages, over chat completions with and without streaming.
TRAINED = {
    "openai_agents": ("tools", "turns"),
    "anthropic": ("tools", "turns"),
    "langchain": ("tools", "stream"),
    "pydantic_ai": ("tools", "structured"),
    "agent_framework": ("tools", "stream"),
    "vercel": ("tools", "forced"),
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Matrix]:
    directory = tmp_path_factory.mktemp("matrix")
    with frameworks.serving(directory, ART_CACHE=art_cache) as server:
        yield Matrix(server, art_cache, directory)


@pytest.mark.timeout(1800)  # a first run creates an environment
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.driver)
def test_a_framework_works_by_its_base_url_alone(matrix: Matrix, framework: Framework) -> None:
    results = matrix.results(framework.environment)
    found = {column: results.get((framework.driver, column)) for column in COLUMNS}
    assert found["chat"] == ""
    assert {column: error for column, error in found.items() if error} == {}


@pytest.mark.timeout(1800)
def test_the_manual_shows_what_the_matrix_saw(matrix: Matrix) -> None:
    results = {}
    for environment in ENVIRONMENTS:
        results |= matrix.results(environment)
    if os.environ.get("WRITE_TABLE"):
        frameworks.write_table(frameworks.table(results))
    hint = "run `WRITE_TABLE=1 scripts/test all tests/contract/test_matrix.py` and commit its page"
    assert frameworks.table_in_manual() == frameworks.table(results), hint


def sampled(server: Serving, rollout: str) -> list[list[int]]:
    """The prompt and completion of every choice of a rollout, as the ledger recorded them."""
    query = "SELECT prompt_ids, completion_ids FROM completions WHERE rollout = ? ORDER BY id"
    with sqlite3.connect(server.state / "ledger.db") as ledger:
        rows = ledger.execute(query, (rollout,)).fetchall()
    return [[*array("i", prompt), *array("i", completion)] for prompt, completion in rows]


@pytest.mark.timeout(1800)
def test_agents_of_six_frameworks_train_on_the_ids_that_were_sampled(matrix: Matrix) -> None:
    server = matrix.server
    groups, expected = [], []
    for driver, columns in TRAINED.items():
        (framework,) = (framework for framework in FRAMEWORKS if framework.driver == driver)
        matrix.results(framework.environment)
        rollouts = [f"{driver}-{column}" for column in columns]
        groups.append(
            {
                "trajectories": [
                    trajectory(rollout, float(reward), base_url=server.openai, as_json=True)
                    for reward, rollout in enumerate(rollouts)
                ]
            }
        )
        expected.append([ids for rollout in rollouts for ids in sampled(server, rollout)])
    # A job stays in the journal until a client reads its result, so its request can be read here.
    job = {"model_id": f"{MODEL['project']}~{MODEL['name']}", "trajectory_groups": groups}
    created = httpx.post(f"{server.openai}/v1/preview/training-jobs", json=job, timeout=60)
    job_id = created.raise_for_status().json()["id"]
    deadline = time.monotonic() + 300
    while server.post("/_get_step", MODEL) < 1:
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        time.sleep(0.1)
    directory = server.state / "contract" / "models" / "matrix"
    request = json.loads((directory / "journal.0001.json").read_text())
    tokenizer = Tokenizer(matrix.tokenizer)
    trained = [
        [
            sequence.ids
            for trained in group["trajectories"]
            for sequence in tokenize_trajectory(tokenizer, trained).sequences
        ]
        for group in request["groups"]
    ]
    events = f"{server.openai}/v1/preview/training-jobs/{job_id}/events"
    httpx.get(events, timeout=60).raise_for_status()
    assert trained == expected
    assert [len(ids) for ids in trained] == [4, 4, 3, 3, 3, 3]
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    line = next(line for line in lines if "data/retokenized" in line)
    assert line["data/retokenized"] == 0
    assert line["data/rendered_prompts"] == 0
    assert line["data/exact_prompts"] == sum(len(ids) for ids in trained)
    assert line["loss/grad_norm"] > 0
