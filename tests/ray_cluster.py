"""A real Ray cluster on loopback: each of its machines has an address of its own."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.processes import descendants
from tests.serving import ROOT, free_port
from trainer.machines.ray_cluster import LEARNER, token_for

ACTOR = "ray::MachineActor"
ENGINE = "trainer.engines.embedded_worker"
KEY = "sesame"
LOG = "ray.log"
RAY = str(Path(sys.executable).with_name("ray"))
_networks = itertools.count(1)


@contextlib.contextmanager
def script_head(
    log: Path, host: str, *, server: Path | str = sys.prefix, **environment: str
) -> Iterator[tuple[int, str]]:
    """Start a head by `scripts/ray-cluster` from the environment `server`; give pid and address."""
    port = free_port()
    command = [str(ROOT / "scripts/ray-cluster"), "head", host, str(port), "--", "sleep", "600"]
    environment = {**os.environ, "ART_API_KEY": KEY, "ART_SERVER": str(server), **environment}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            while "Ray's head is at" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield process.pid, f"{host}:{port}"
        finally:
            process.send_signal(signal.SIGTERM)


def environment_with_dashboard(directory: Path) -> Path:
    """Make an environment with nothing but the extra `dashboard`."""
    pins = ROOT / "requirements/laptop.txt"
    install = ["pip", "install", "--quiet", "--constraints", str(pins), "ray[default]"]
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, directory], check=True)
    subprocess.run(["uv", *install, "--python", str(directory / "bin/python")], check=True)
    return directory


class RayHosts:
    """`with RayHosts(directory) as hosts:` starts the head; `join` adds a machine."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self._directory = directory
        # Addresses of its own, for tests that run at the same time.
        self._network = f"127.{os.getpid() % 250 + 1}.{next(_networks) % 250}"
        self.address = f"{self._network}.1:{free_port()}"
        self.environment = {
            **os.environ,
            "ART_API_KEY": KEY,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token_for(KEY),
            "OMP_NUM_THREADS": "1",
            # Ray would end actors because of the memory that other tests use meanwhile.
            "RAY_memory_monitor_refresh_ms": "0",
            **environment,
        }
        self._temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need short paths
        self._machines: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        alone = ("--include-dashboard=false", "--no-monitor", "--num-cpus=0")
        client = ("--ray-client-server-port", str(free_port()))
        self._start(host, "--head", "--port", port, *alone, *client)
        while "Ray runtime started" not in (told := (self._directory / host / LOG).read_text()):
            assert self._machines[host].poll() is None, told
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        for address in reversed(list(self._machines)):
            self.leave(address)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def join(self, number: int = 2) -> str:
        """Add a machine, and return its address."""
        address = f"{self._network}.{number}"
        resources = json.dumps({LEARNER: 1})
        self._start(address, "--address", self.address, "--num-cpus=1", "--resources", resources)
        return address

    def leave(self, address: str) -> None:
        """Kill a machine with everything on it."""
        process = self._machines.pop(address)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def pid(self, address: str, name: str) -> int:
        """The process on a machine whose command line has `name`, when it has started."""
        while True:
            for pid in descendants(self._machines[address].pid):
                with contextlib.suppress(OSError):  # it has ended
                    if name in Path(f"/proc/{pid}/cmdline").read_text():
                        return pid
            time.sleep(0.05)

    def _start(self, address: str, *arguments: str) -> None:
        directory = self._directory / address
        directory.mkdir(parents=True)
        with (directory / LOG).open("wb") as log:
            self._machines[address] = subprocess.Popen(
                [
                    *(RAY, "start", "--block", "--node-ip-address", address, *arguments),
                    *("--num-gpus=0", "--object-store-memory=100000000"),
                    *("--disable-usage-stats", "--include-log-monitor=false"),
                    *("--temp-dir", self._temporary),
                ],
                cwd=directory,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
