"""Every way in which `launcher up` can fail leaves no cluster, or names the one that it leaves."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster import Cluster
from launcher.errors import LauncherError, Unreachable
from launcher.settings import Settings
from launcher.skypilot import door
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeSky, FakeStatus
from launcher.task import Task
from tests.serving import ROOT, free_port

# SkyPilot warns about its own dependencies on import.
pytestmark = pytest.mark.filterwarnings("ignore")
DOWN = "launcher down -c art"


class ResourcesUnavailableError(Exception):
    """Named like SkyPilot's."""


@dataclass
class FailingSky(FakeSky):
    """Fails at one point of a launch."""

    at: str = ""
    error: BaseException | None = None
    signal: int = 0

    def fail(self, at: str) -> None:
        if at == self.at and self.signal:
            os.kill(os.getpid(), self.signal)
        if at == self.at and self.error:
            raise self.error

    def make_cluster(self, name: str, status: FakeStatus = FakeStatus.UP, **record: Any) -> None:
        self.fail("before")
        place = {"cloud": "aws", "region": None, "resources_str": "1x"}
        super().make_cluster(name, FakeStatus.INIT, **place, **record)
        self.fail("provision")
        super().make_cluster(name, status, **place, **record)

    def exec(self, task: Any, cluster_name: str) -> str:
        self.fail("server")
        return super().exec(task, cluster_name)

    def queue(self, cluster_name: str) -> str:
        self.fail("queue")
        return super().queue(cluster_name)


class Provider(SkyProvider):
    """Reaches nothing: the ports of its tunnel do not answer."""

    def __init__(self, sky: FailingSky) -> None:
        self._sky = sky

    @contextlib.contextmanager
    def tunnel(self, name: str, ports: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        self._sky.fail("tunnel")
        yield {port: free_port() for port in ports}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "task.yaml"
    path.write_text("resources: {cpus: 4, memory: 8}\nsetup: echo set up\nrun: echo serve\n")
    return Task.load(path, Settings())


def up(sky: FailingSky, task: Task) -> list[str]:
    """Bring a cluster up, and return the messages."""
    messages: list[str] = []
    with door.replaced(sky):
        cluster = Cluster("art", provider=Provider(sky), settings=Settings())
        try:
            cluster.up(task, progress=messages.append, interval=0.05)
        except LauncherError as error:
            messages.append(f"{error.message} {error.hint}")
        except KeyboardInterrupt:
            messages.append("interrupted")
    return messages


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("before", ResourcesUnavailableError("no capacity")),
        ("provision", ResourcesUnavailableError("no capacity")),
        ("provision", RuntimeError("quota")),
        ("provision", ConnectionError("the API server died")),
        ("tunnel", Unreachable("ssh: connect refused")),
        ("queue", ConnectionError("the API server died")),
        ("server exits", None),
        ("setup fails", None),
    ],
    ids=str,
)
def test_a_launch_that_fails_names_the_cluster_it_leaves(
    task: Task, at: str, error: Exception | None
) -> None:
    sky = FailingSky(at=at, error=error)
    if error is None:
        status = FakeStatus.FAILED_SETUP if at == "setup fails" else FakeStatus.FAILED
        start = sky.request

        def fails(name: str, cluster: str | None, work: Callable[[], Any]) -> str:
            made = start(name, cluster, work)
            for job in sky.queues.get("art", {}).values():
                job.status, job.log = status, "out of memory\n"
            return made

        sky.request = fails  # type: ignore[method-assign]
    said = up(sky, task)[-1]
    assert (DOWN in said) == ("art" in sky.records), said
    assert ("art" in sky.records) == (at != "before")


@pytest.mark.parametrize("at", ["before", "provision", "tunnel", "queue"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launch_that_is_interrupted_names_the_cluster(task: Task, at: str, number: int) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command does
    try:
        *_, named, end = up(FailingSky(at=at, signal=number), task)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end == "interrupted" and "cluster `art` may exist" in named and DOWN in named


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_launcher_leaves_a_cluster_that_is_listed_and_can_be_ended(
    tmp_path: Path, number: int
) -> None:
    (tmp_path / "task.yaml").write_text("run: sleep 600\n")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment |= {"ART_PORT": str(free_port()), "ART_OPENAI_PORT": str(free_port())}

    def launcher(*arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", *arguments, "--local"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    launch = launcher("up", "task.yaml")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".art-cluster/clusters/art/runs/1/pid")):
        assert time.monotonic() < deadline and launch.poll() is None
        time.sleep(0.05)
    launch.send_signal(number)
    _, errors = launch.communicate(timeout=60)
    assert launch.returncode != 0
    assert number == signal.SIGKILL or "launcher down --local -c art" in errors, errors
    assert launcher("ls").communicate(timeout=60)[0].startswith("art\tup\t")
    assert launcher("down", "--discard", "--yes").wait(60) == 0
    assert launcher("ls").communicate(timeout=60)[0] == ""
