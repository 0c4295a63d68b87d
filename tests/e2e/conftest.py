"""A laptop with a fresh clone and an empty home, here or in front of a real Slurm cluster."""

import contextlib
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.page_view import WAIT_MS

REPOSITORY = Path(__file__).parents[2]
LAB = Path("/tmp/art-slurm-lab")
SECRET = f"hf_{secrets.token_hex(16)}"
# The controller of managed runs lives in the API server of the laptop. Before it replaces a lost
# cluster SkyPilot asks two public addresses whether the network is there; the lab has only itself.
CONTROLLER = r"""
printf 'jobs: {controller: {consolidation_mode: true}}\n' >>~/.sky/config.yaml
sed -i "s#^_TEST_IP_LIST = .*#_TEST_IP_LIST = ['http://127.0.0.1:46599/api/health']#" \
  .venv/lib/python3.*/site-packages/sky/backends/backend_utils.py
"""


@dataclass(frozen=True)
class Laptop:
    """Runs bash commands in a clone of the repository, as its user would."""

    clone: Path
    prefix: tuple[str, ...]
    environment: Mapping[str, str]
    target: str
    """Options that lead a launcher command to the cluster."""
    ports: tuple[int, int]
    """Where the server is reached on this machine."""
    secret: str = SECRET
    """What HF_TOKEN is in its `.env`."""

    def run(self, command: str, *, code: int = 0) -> str:
        """Return stdout of `command`; what it told on stderr is in the failure."""
        return self.finish(self.start(command), code=code)

    def start(self, command: str) -> "subprocess.Popen[str]":
        """Begin `command`; `finish` waits for it."""
        return subprocess.Popen(
            [*self.prefix, command],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: "subprocess.Popen[str]", *, code: int = 0) -> str:
        out, err = process.communicate()
        command = str(process.args[-1])  # type: ignore[index]
        assert process.returncode == code, f"{command}\n{out}\n{err}"
        assert SECRET not in out + err, f"{command} tells a secret"
        return out

    def fails(self, command: str) -> str:
        """What `command` says on stderr as it ends with our exit code for an error."""
        process = self.start(command)
        _, err = process.communicate()
        assert process.returncode == 1, f"{command}\n{err}"
        return err

    def take_ports(self) -> None:
        """Have the next server listen elsewhere, whatever the last one left behind."""
        write_env(self.clone, self.free_ports())

    @staticmethod
    def free_ports() -> tuple[int, int]:
        """Two that nobody listens on, one after the other, below those that clients get."""
        while True:
            first = random.randrange(26000, 32000)
            with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
                one.bind(("", first))
                other.bind(("", first + 1))
                return first, first + 1

    @contextlib.contextmanager
    def tunnel(self) -> Iterator[str]:
        """Hold `launcher tunnel` open, and give the exports that it prints."""
        options = f"{self.target} --port {self.ports[0]} --openai-port {self.ports[1]}"
        process = subprocess.Popen(
            [*self.prefix, f"exec .venv/bin/launcher tunnel {options}"],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            exports = [process.stdout.readline().strip() for _ in range(2)]
            assert all(line.startswith("export ") for line in exports), exports
            yield "; ".join(exports)
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.communicate(timeout=60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@pytest.fixture
def train_two_steps() -> Callable[[Laptop, str], None]:
    """The real openpipe-art client registers, rolls out and trains through an open tunnel."""

    def train(laptop: Laptop, exports: str) -> None:
        told = laptop.run(
            # Importing the client would ask the internet for a list of prices.
            f"{exports}; export LITELLM_LOCAL_MODEL_COST_MAP=True; "
            ".venv/bin/python tests/e2e/train_two_steps.py e2e tiny ../base"
        )
        steps = json.loads(told.splitlines()[-1])
        assert [step["step"] for step in steps] == [1, 2]
        assert all(step["grad_norm"] > 0 for step in steps)

    return train


@pytest.fixture
def pull_home() -> Callable[[Laptop, str], None]:
    """`launcher pull` brings home what `there` (lines of `sha256sum`) lists, and once only."""

    def pull(laptop: Laptop, there: str) -> None:
        pulled = json.loads(laptop.run(f".venv/bin/launcher pull{laptop.target} --json"))
        assert [(it["model"], it["step"], it["new"]) for it in pulled] == [
            ("tiny", step, True) for step in range(3)
        ]
        here = laptop.run(
            "cd checkpoints && find . -path '*/checkpoints/*' -type f -exec sha256sum {} +"
        )
        assert sorted(here.splitlines()) == sorted(there.splitlines())
        again = json.loads(laptop.run(f".venv/bin/launcher pull{laptop.target} --json"))
        assert not any(it["new"] for it in again)

    return pull


@pytest.fixture
def run_beside() -> Callable[[Laptop], None]:
    """`launcher run` starts a command beside the server, in its environment."""

    def run(laptop: Laptop) -> None:
        command = (
            'test "$(command -v trainer)" = "$PWD/.venv/bin/trainer"; echo $ART_BASE_URL; exit 3'
        )
        told = laptop.run(f".venv/bin/launcher run{laptop.target} --wait '{command}'", code=3)
        assert "http://127.0.0.1:" in told
        runs: list[Any] = json.loads(
            laptop.run(f".venv/bin/launcher ls{laptop.target} -c art --json")
        )
        assert [run["status"] for run in runs][-2:] == ["running", "failed"]
        last = laptop.run(f".venv/bin/launcher logs {runs[-1]['id']}{laptop.target} --no-follow")
        assert "http://127.0.0.1:" in last

    return run


@pytest.fixture(scope="module")
def local_laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """A clone on this machine with an empty home, for `--local`."""
    tmp_path = tmp_path_factory.mktemp("laptop")
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, clone / name)
    ports = Laptop.free_ports()
    write_env(clone, ports)
    own = str(Path(os.environ.get("VIRTUAL_ENV", "/nowhere")) / "bin")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
        "HOME": str(home),
        "PATH": ":".join(part for part in os.environ["PATH"].split(":") if part != own),
        # The clone's environment has the packages of this one, which `scripts/install` made.
        "ART_SEED_ENVIRONMENT": str(REPOSITORY / ".venv"),
    }
    laptop = Laptop(clone, ("bash", "-euo", "pipefail", "-c"), environment, " --local", ports)
    yield laptop
    if (clone / ".venv/bin/launcher").exists():
        laptop.run(".venv/bin/launcher down --local --discard --yes")


@pytest.fixture(scope="session")
def slurm_laptop() -> Iterator[Laptop]:
    """A clone in the home of a user whose only cloud is a Slurm cluster, made for this session."""
    script = str(REPOSITORY / "tests/lab/slurm.sh")
    lock = LAB.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # one lab on a machine: a second session waits
    try:
        up = subprocess.run([script, "up"], capture_output=True, text=True)
        assert up.returncode == 0, up.stdout + up.stderr
        clone = LAB / "home/artdev/art-cluster"
        laptop = Laptop(clone, (str(LAB / "as-dev"),), os.environ, "", Laptop.free_ports())
        laptop.take_ports()
        laptop.run(f"scripts/install; {CONTROLLER}")
        yield laptop
    finally:
        subprocess.run([script, "down"], check=True)
        lock.close()


def write_env(clone: Path, ports: tuple[int, int]) -> None:
    """Ports that are free here (one machine plays both sides), and a secret to look for."""
    text = f"ART_PORT={ports[0]}\nART_OPENAI_PORT={ports[1]}\nHF_TOKEN={SECRET}\n"
    (clone / ".env").write_text(text)
    (clone / ".env").chmod(0o600)
    shutil.chown(clone / ".env", clone.owner())


@pytest.fixture(scope="session")
def chromium() -> str:
    """Debian's Chromium; a machine that has none yet gets it."""
    if shutil.which("chromium") is None:
        quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install -y --no-install-recommends chromium"):
            subprocess.run(["apt-get", "-qq", *command.split()], check=True, env=quietly)
    return str(shutil.which("chromium"))


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        # The tests run as root in a container, where Chromium's own sandbox does not start.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test if anything on it does."""
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert not [it for it in faults if "404" not in it and "ERR_" not in it], faults
