"""One engine of each kind for all files of this folder: vLLM starts slowly."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract.nodes import engines_of, ready
from tests.ray_cluster import RayHosts
from tests.serving import vllm_python
from trainer.base_model.resolve import resolve
from trainer.engines.choose import vllm_program
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Engine
from trainer.engines.vllm import VllmEngine
from trainer.machines.replicas import Replicas


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def engines(
    tmp_path_factory: pytest.TempPathFactory, art_cache: str
) -> AsyncIterator[dict[str, Engine]]:
    directory = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        patch.setenv("OMP_NUM_THREADS", "1")
        model = resolve("tiny-random")
        embedded = EmbeddedEngine(model, log=directory / "embedded.log")
        vllm = VllmEngine(
            model,
            program=vllm_program(vllm_python()),
            log=directory / "vllm.log",
            rank=4,
            cuda=False,
            arguments={"max_model_len": 2048},
        )
        try:
            await asyncio.gather(embedded.start(), vllm.start())
            yield {"embedded": embedded, "vllm": vllm}
        finally:
            await asyncio.gather(embedded.stop(), vllm.stop())


@pytest_asyncio.fixture(loop_scope="session", scope="module")  # a process joins one cluster
async def replicas(
    tmp_path_factory: pytest.TempPathFactory, art_cache: str, ray_hosts: RayHosts
) -> AsyncIterator[Replicas]:
    """Two embedded engines that act as one; the second is on another machine of a Ray cluster."""
    directory = tmp_path_factory.mktemp("replicas")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        patch.setenv("OMP_NUM_THREADS", "1")
        async with engines_of(ray_hosts, directory) as replicas:
            await ready(replicas)
            yield replicas


@pytest.fixture(params=["embedded", "vllm", "replicas"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "replicas":
        return request.getfixturevalue("replicas")
    return request.getfixturevalue("engines")[request.param]


@pytest.fixture(params=["embedded", "vllm"])
def alone(engines: dict[str, Engine], request: pytest.FixtureRequest) -> Engine:
    """An engine without replicas; `test_replicas` covers those."""
    return engines[request.param]
