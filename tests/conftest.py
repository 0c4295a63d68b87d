"""Every test gets an empty home and no credentials; in CI none is skipped silently.

Two pytest workers share the machine (`scripts/test`). Each takes whole groups of tests: a file by
default, so that its fixtures are built once, or the files that compete for one thing.
"""

import functools
import os
import random
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from launcher.skypilot.testing import FakeSky

_CREDENTIALS = (
    "ART_", "AWS_", "AZURE_", "BASE_MODEL", "GOOGLE_", "HF_", "LANGFUSE_", "LAUNCHER_",
    "OPENAI_", "OPENPIPE_", "WANDB_",
)  # fmt: skip
# In the background of a shell it is ignored, and so would be a tunnel that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# In GiB, and enough for tiny models. Up to four vLLMs live at once, besides a cluster on Slurm.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# httpx reads every certificate of the world for each client, also for one call on loopback.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=1, help="multiply the cases of tests that make them up"
    )
    parser.addoption(
        "--seed", type=int, default=1, help="make up other cases; a run with the same seed repeats"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout, which reads its option then
def pytest_configure(config: pytest.Config) -> None:
    if config.option.rounds > 1 and config.option.timeout is None:
        config.option.timeout = config.option.rounds * float(config.getini("timeout"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of the cases that tests make up: --seed {config.option.seed}"


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """How many times the usual number of cases a test that makes up its cases runs."""
    return int(request.config.getoption("--rounds"))


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """The random numbers of one test: the same ones again with the `--seed` of the run."""
    seed = request.config.getoption("--seed")
    request.node.add_report_section("call", "seed", f"make up the same cases: --seed {seed}")
    return random.Random(f"{seed} {request.node.nodeid}")


# Groups that take minutes start first, so that neither worker is left with a long one at the end.
# Tests outside these files form a group per file, in the order of collection.
_LONG_GROUPS = {
    "slurm": ("e2e/test_slurm.py", "e2e/test_slurm_nodes.py"),  # one Slurm cluster on a machine
    "smollm2": ("e2e/test_local.py", "e2e/test_notebook.py"),  # both cores busy: not twice at once
    "nat": ("contract/test_nat.py",),
    "matrix": ("contract/test_matrix.py",),
    "kill": ("faults/test_kill.py",),
}
_VLLM = "vllm"  # one vLLM server, and one environment to build


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0].removeprefix("tests/")
    for name, files in _LONG_GROUPS.items():
        if file in files:
            return name
    # In `engines` every other engine is compared with vLLM.
    compares = file.startswith(("contract/engines/", "contract/test_parts.py"))
    is_vllm = file.startswith("contract/") and "vllm" in nodeid.partition("[")[2]
    return _VLLM if compares or is_vllm else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the groups that take minutes first."""
    order = {name: place for place, name in enumerate([*_LONG_GROUPS, _VLLM])}
    items.sort(key=lambda item: order.get(_group(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let each worker take whole groups. `loadgroup` of xdist 3.8 has no effect on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return GroupScheduling(config, log)


def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's temporary directory; workers of one session share it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def art_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache of built-in models for the whole session: no test is about building them."""
    return str(shared_directory(tmp_path_factory) / "art-cache")


@pytest.fixture(autouse=True)
def _isolated(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, art_cache: str
) -> None:
    """No test reads your keys or writes into your home."""
    for name in os.environ:
        if name.startswith(_CREDENTIALS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("ART_CACHE", art_cache)


@pytest.fixture
def sky() -> Iterator["FakeSky"]:
    """A `FakeSky` in place of SkyPilot, for the length of a test."""
    # Imported here: most tests need no launcher.
    from launcher.skypilot.door import replaced
    from launcher.skypilot.testing import FakeSky

    with replaced(FakeSky()) as fake:
        yield fake


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI a skipped test is a failure, unless it needs a GPU or a cloud account."""
    report = yield
    excused = any(item.iter_markers("gpu")) or any(item.iter_markers("cloud"))
    if os.environ.get("CI") and report.skipped and not excused and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In CI, print a failure at once: a run that is stopped never reaches its summary."""
    if os.environ.get("CI") and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        captured = "".join(f"\n--- {name}\n{text[-2000:]}" for name, text in report.sections)
        told = f"{report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}{captured}"
        sys.stdout.write(f"\n{told}\n")
        sys.stdout.flush()
