"""One vLLM over several machines: parts of it run in actors of a real Ray cluster on loopback."""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contract.loras import write_lora
from tests.contract.nodes import wait_until
from tests.processes import wait_until_gone
from tests.ray_cluster import KEY, RayHosts
from tests.serving import vllm_python
from trainer.base_model.resolve import resolve
from trainer.config import ServerConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Delta, Engine, SampleRequest, sample_with_retries
from trainer.engines.vllm import VllmEngine
from trainer.errors import Conflict, WorkerDied
from trainer.machines import parts
from trainer.machines.parts import Parts
from trainer.machines.ray_cluster import connect

FAKE = Path(__file__).with_name("fake_vllm.py")
PART = "--headless"
PROMPT = [256, 257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]
SIZES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}  # not by layers on a CPU
CONFIG = ServerConfig(engine="vllm", ray="auto", engine_nodes=2, engine_args=SIZES)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every machine starts as `vllm`."""
    return tmp_path_factory.mktemp("program") / "vllm"


def use(program: Path, *command: str) -> None:
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)


@pytest.fixture(scope="module")
def hosts(
    tmp_path_factory: pytest.TempPathFactory, art_cache: str, program: Path
) -> Iterator[RayHosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with RayHosts(directory, ART_CACHE=art_cache, ART_VLLM=str(program)) as hosts:
        hosts.join()
        yield hosts


@pytest.fixture
def other(hosts: RayHosts) -> str:
    return hosts.address.rpartition(":")[0][:-1] + "2"


@pytest.fixture
def fake(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(program, sys.executable, str(FAKE))
    monkeypatch.setenv("FAKE_VLLM_REQUESTS", str(tmp_path / "requests"))


@asynccontextmanager
async def divided(hosts: RayHosts, program: Path, directory: Path) -> AsyncIterator[VllmEngine]:
    """Join a cluster, and start an engine that its machines hold together."""
    log = {"log": directory / "engine.log", "program": [str(program), "serve"]}
    model = resolve("tiny-random")
    engine = VllmEngine(model, **log, rank=8, cuda=False, arguments=SIZES, nodes=2)  # type: ignore[arg-type]
    cluster = await asyncio.to_thread(connect, hosts.address, KEY)
    engine.divide(Parts(CONFIG, "tiny-random", cluster))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def sample(engine: Engine, lora: str | None = None) -> Delta:
    request = SampleRequest(PROMPT, lora=lora, max_tokens=4, temperature=0)

    @asynccontextmanager
    async def attempt() -> AsyncIterator[AsyncIterator[Delta]]:
        yield engine.sample(request)

    (delta,) = [it async for it in sample_with_retries(attempt, attempts=2, stream=False)]
    return delta


async def test_two_machines_hold_one_model_and_its_loras(
    hosts: RayHosts, program: Path, other: str, tmp_path: Path
) -> None:
    use(program, vllm_python(), "-m", "vllm.entrypoints.cli.main")
    lora = write_lora(tmp_path / "0001", seed=1)
    whole = EmbeddedEngine(resolve("tiny-random"), log=tmp_path / "whole.log")
    await whole.start()
    try:
        await whole.load("run@1", lora)
        expected = {name: await sample(whole, name) for name in (None, "run@1")}
    finally:
        await whole.stop()
    async with divided(hosts, program, tmp_path) as engine:
        part = hosts.pid(other, PART)
        await engine.load("run@1", lora)
        for name in expected:
            told = await sample(engine, name)
            assert told.token_ids == expected[name].token_ids
            assert told.logprobs == pytest.approx(expected[name].logprobs, abs=1e-3)
        with pytest.raises(Conflict, match="tensor_parallel_size"):
            await engine.configure({"tensor_parallel_size": 1})
    wait_until_gone([part])


@pytest.mark.usefixtures("fake")
async def test_a_lost_part_ends_all_and_the_next_request_starts_them_again(
    hosts: RayHosts, program: Path, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lora(tmp_path / "0001", seed=1)
    async with divided(hosts, program, tmp_path) as engine:
        await engine.load("run@1", path)
        expected = await sample(engine, "run@1")
        first = engine._process
        part = hosts.pid(other, PART)
        os.kill(part, signal.SIGKILL)
        await wait_until(lambda: not first.running)
        assert f"vLLM's part on `{os.uname().nodename}` is lost: vLLM ended" in caplog.text
        await engine.load("run@1", path)
        assert (await sample(engine, "run@1")).token_ids == expected.token_ids
        again = hosts.pid(other, PART)
        assert again != part
        # The head's own vLLM dies: the part, which would wait for it forever, starts again too.
        assert engine._process._process
        os.kill(engine._process._process.pid, signal.SIGTERM)
        await wait_until(lambda: not engine.running)
        assert (await sample(engine)).token_ids == expected.token_ids
        wait_until_gone([again])
        await engine.unload("run@1")
        assert not list(engine._parts._links.iterdir())  # type: ignore[union-attr]


@pytest.mark.usefixtures("fake")
async def test_a_spare_machine_replaces_one_that_leaves(
    hosts: RayHosts, program: Path, other: str, tmp_path: Path
) -> None:
    async with divided(hosts, program, tmp_path) as engine:
        expected = await sample(engine)
        first = engine._process
        await asyncio.to_thread(hosts.join, 3)
        await wait_until(lambda: len(engine._parts._machines) == 2)  # type: ignore[union-attr]
        hosts.leave(other)
        await wait_until(lambda: not first.running)
        assert await sample(engine) == expected
        assert hosts.pid(other[:-1] + "3", PART)


@pytest.mark.usefixtures("fake")
async def test_too_few_machines_are_an_error_that_says_how_many(
    hosts: RayHosts, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "JOIN_WITHIN", 3.0)
    monkeypatch.setattr(
        sys.modules[__name__], "CONFIG", CONFIG.model_copy(update={"engine_nodes": 9})
    )
    with pytest.raises(WorkerDied, match=r"`engine_nodes` is 9, but .* has [12] machines"):
        async with divided(hosts, program, tmp_path):
            pass


@pytest.mark.usefixtures("fake")
async def test_a_part_that_cannot_start_says_why(
    hosts: RayHosts, program: Path, tmp_path: Path
) -> None:
    program.write_text(
        "#!/bin/sh\ncase \"$*\" in *--headless*) echo 'ValueError: no memory here' >&2;"
        " exit 1;; esac; exec sleep 60\n"
    )
    with pytest.raises(WorkerDied, match=r"part on `.*` ended: vLLM ended: ValueError: no memory"):
        async with divided(hosts, program, tmp_path):
            pass
