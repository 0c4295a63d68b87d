import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.ray_cluster import RayHosts
from tests.serving import Serving, vllm_python


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("server")
    with Serving(directory, "tiny-random", ART_CACHE=art_cache) as serving:
        yield serving


@pytest.fixture(scope="session")
def rsync() -> None:
    """The real one; a machine that has none yet gets it, as for the Slurm cluster."""
    if shutil.which("rsync") is None:
        quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install -y --no-install-recommends rsync"):
            subprocess.run(["apt-get", "-qq", *command.split()], check=True, env=quietly)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    """The same with vLLM, on a CPU and from its own environment."""
    directory = tmp_path_factory.mktemp("vllm-server")
    arguments = ("--engine", "vllm")
    variables = {"ART_CACHE": art_cache, "ART_VLLM": vllm_python()}
    with Serving(directory, "tiny-random", *arguments, **variables) as serving:
        yield serving


@pytest.fixture(scope="session")
def ray_hosts(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[RayHosts]:
    """A Ray cluster with a head and one more machine, which every test leaves as it was."""
    with RayHosts(tmp_path_factory.mktemp("hosts"), ART_CACHE=art_cache) as hosts:
        hosts.join()
        yield hosts
