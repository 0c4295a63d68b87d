"""Unmodified frameworks, each by its base URL alone.

With `WRITE_TABLE=1` the table in `docs/frameworks.md` is written instead of compared.
"""

import os
from collections.abc import Iterator

import pytest

from tests.contract.frameworks import matrix as frameworks
from tests.contract.frameworks.matrix import COLUMNS, FRAMEWORKS, Framework, Matrix

ENVIRONMENTS = list(dict.fromkeys(framework.environment for framework in FRAMEWORKS))


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
