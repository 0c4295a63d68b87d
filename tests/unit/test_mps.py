"""`--mps`: the daemon that joins engine and learner, with a stand-in for NVIDIA's program."""

from pathlib import Path
from typing import Any

import pytest

from kit.errors import ConfigError
from tests.processes import descendants, wait_until_gone
from trainer.config import ServerConfig
from trainer.engines.choose import has_stream_priority
from trainer.engines.vllm_args import EXTENSION, KERNELS, WITHOUT_KERNELS
from trainer.errors import TrainerError
from trainer.processes.mps import PROGRAM, Mps
from trainer.server.workers import Workers

DAEMON = """#!/bin/sh
[ "$1" = -f ] || exit 2
sleep 600 &
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
wait
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / PROGRAM
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


@pytest.mark.usefixtures("program")
async def test_the_daemon_lives_as_long_as_the_server_needs_it(tmp_path: Path) -> None:
    mps = Mps(tmp_path / "logs" / "mps.log")
    await mps.start()
    directory = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"])
    assert directory.is_dir() and directory.stat().st_mode & 0o077 == 0
    assert mps._process
    pids = [mps._process.pid, *descendants(mps._process.pid)]
    assert len(pids) == 3
    await mps.stop()
    wait_until_gone(pids)
    assert not directory.exists()
    await mps.stop()  # a second time does nothing


async def test_a_daemon_that_ends_at_once_is_an_error(program: Path, tmp_path: Path) -> None:
    program.write_text("#!/bin/sh\necho no GPU; exit 1\n")
    with pytest.raises(TrainerError, match="CUDA MPS did not start"):
        await Mps(tmp_path / "mps.log").start()
    assert "no GPU" in (tmp_path / "mps.log").read_text()


async def test_mps_without_the_program_or_a_shared_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=f"there is no program `{PROGRAM}`"):
        await Mps(tmp_path / "mps.log").start()
    config = ServerConfig(state_dir=str(tmp_path), mps=True)
    with pytest.raises(ConfigError, match="share no GPU"):
        await Workers(config).start("tiny-random", {})


@pytest.mark.parametrize(
    ("engine", "own", "later", "expected"),
    [
        ("vllm", {}, {}, True),
        ("vllm", {EXTENSION: KERNELS}, {}, True),
        ("vllm", {EXTENSION: WITHOUT_KERNELS}, {}, True),
        ("vllm", {EXTENSION: ""}, {}, False),
        ("vllm", {}, {EXTENSION: "mine.Worker"}, False),
        ("embedded", {}, {}, False),
    ],
)
def test_only_an_engine_with_our_extension_has_a_priority(
    engine: Any, own: dict[str, Any], later: dict[str, Any], expected: bool
) -> None:
    assert has_stream_priority(ServerConfig(engine=engine, engine_args=own), later) is expected
