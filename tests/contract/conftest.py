from collections.abc import Iterator

import pytest

from tests.serving import Serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    cache = str(tmp_path_factory.getbasetemp() / "art-cache")
    directory = tmp_path_factory.mktemp("server")
    with Serving(directory, "tiny-random", ART_CACHE=cache) as serving:
        yield serving
