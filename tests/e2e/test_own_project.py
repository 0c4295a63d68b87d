"""A project of the user's own: the wheel of the kit, an empty home, and no clone.

The two tests share an environment with the wheel. The second runs the tutorial as it is printed.
"""

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.serving import free_port

ROOT = Path(__file__).parents[2]
PROJECT = """
[project]
name = "mine"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = ["pydantic<2"]
"""
SHADOW = "raise SystemExit('this file of the project is not the kit')\n"
PAGE = (ROOT / "docs" / "your-own-agent.md").read_text()
# Two examples and one epoch, of ten and eight, so that the whole page takes few minutes.
SHORT = " -o finetuning.num_epochs 1 -o trajectory_builders.builder.examples_per_epoch 2"
VERSION = 'python -c "import pydantic; print(pydantic.VERSION)"'


def uv() -> str:
    found = shutil.which("uv", path=f"{os.environ['PATH']}:{ROOT}/.uv/bin:{ROOT}/.venv/bin")
    if found is None:
        pytest.skip("uv is not installed")
    return found


@dataclass
class Owner:
    """Someone with the wheel of the kit, who types commands in a directory of their own."""

    directory: Path
    wheel: Path
    environment: dict[str, str]

    def run(self, *command: str, code: int | None = 0, typed: str | None = None) -> str:
        done = subprocess.run(
            command, cwd=self.directory, env=self.environment, input=typed, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert code is None or done.returncode == code, f"{command}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    tmp_path = tmp_path_factory.mktemp("owner")
    own, mine, home = tmp_path / "venv", tmp_path / "mine", tmp_path / "home"
    cache = os.environ.get("UV_CACHE_DIR") or subprocess.run(
        [uv(), "cache", "dir"], env={**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir},
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "UV_", "SSL_")) or name in ("LANG", "OMP_NUM_THREADS")
    }
    environment = {
        **inherited,
        "HOME": str(home),
        "UV_CACHE_DIR": cache,
        "PATH": f"{own}/bin:/usr/local/bin:/usr/bin:/bin:{Path(uv()).parent}",
        "ART_PORT": str(free_port()),
        "ART_OPENAI_PORT": str(free_port()),
    }
    mine.mkdir()
    home.mkdir()
    it = Owner(mine, tmp_path, environment)
    it.run(uv(), "build", "--quiet", "--wheel", "--out-dir", str(tmp_path / "dist"), str(ROOT))
    it.run(uv(), "venv", "--quiet", "--python", "3.11", str(own))
    (it.wheel,) = (tmp_path / "dist").glob("*.whl")
    it.run(uv(), "pip", "install", "--quiet", "--python", f"{own}/bin/python", str(it.wheel))
    return it


@pytest.mark.timeout(900)
def test_a_wheel_is_all_that_a_project_with_other_pins_needs(owner: Owner) -> None:
    mine, run = owner.directory, owner.run
    owner.environment["BASE_MODEL"] = "tiny-random"
    (mine / "pyproject.toml").write_text(PROJECT)
    for name in ("trainer.py", "kit.py"):
        (mine / name).write_text(SHADOW)
    before = sorted(mine.iterdir())

    assert "Prices are unknown: SkyPilot is not" in run("launcher", "doctor", "tiny-random")
    assert "art-cpu\t" in run("launcher", "tasks")
    task = (ROOT / "sky/art-cpu.yaml").read_text()
    assert run("launcher", "tasks", "show", "art-cpu") == task
    try:
        assert "is up and its server is healthy" in run("launcher", "up", "--local")
        told = run("launcher", "run", "--local", "--wait", VERSION)
        assert told.splitlines()[-1].startswith("1."), told
        home = Path(owner.environment["HOME"])
        state = home / ".art-cluster/clusters/art/home/sky_workdir/.art"
        assert (state / ".gitignore").read_text() == "*\n"
        # The same environment again, and the server's programs after the project's.
        where = run("launcher", "run", "--local", "--wait", "command -v python; echo $PATH")
        assert "Installing" not in where and "/.art-cluster/projects/" in where.splitlines()[0]
        assert where.strip().endswith("/.art-cluster/server/bin")

        # A new dependency goes with the next sync; one that cannot be had fails its run alone.
        (mine / "pyproject.toml").write_text(PROJECT.replace("<2", "<1.10"))
        run("launcher", "sync", "--local")
        told = run("launcher", "run", "--local", "--wait", VERSION)
        assert told.splitlines()[-1].startswith("1.9."), told
        (mine / "pyproject.toml").write_text(PROJECT.replace('<2"', '<2", "pydantic>2"'))
        run("launcher", "sync", "--local")
        told = run("launcher", "run", "--local", "--wait", "true", code=1)
        assert "The dependencies of the project cannot be installed" in told
        refused = run("launcher", "up", "--local", "-c", "other", code=1)
        assert "do not resolve" in refused and "Nothing was launched" in refused
        assert "healthy" in run("launcher", "up", "--local")  # the server goes on
    finally:
        run("launcher", "down", "--local", "--discard", "--yes")
    assert sorted(mine.iterdir()) == before


def typed(page: str) -> Iterator[str]:
    """The commands in the page's blocks, one per line."""
    page = page.partition("## Train on a rented GPU")[0]  # `test_slurm` rents, runs and ends one
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        yield from filter(None, (line.partition("  #")[0].strip() for line in block.splitlines()))


def as_run_here(command: str, owner: Owner) -> str:
    """The same command with this test's ports, wheel and length, on a cluster of this machine."""
    command = command.replace("file:///PATH/TO/THE.whl", f"file://{owner.wheel}")
    command = command.replace("pip install", f"{uv()} pip install --quiet --python $(which python)")
    command = command.replace("0008", "0001").replace("@8", "@1")  # one epoch, one step
    if re.match(r"launcher (up|run|down)", command) and "--local" not in command:
        command = re.sub(r"launcher (\w+)", r"launcher \1 --local", command)  # no GPU to rent here
    if "trainer finetune" in command:
        command += SHORT
    if command.startswith("trainer chat"):
        command += f" --max-tokens 8 --url http://127.0.0.1:{owner.environment['ART_OPENAI_PORT']}"
    return command


def look_at_the_page(owner: Owner, command: str) -> None:
    """`launcher open` runs until Ctrl-C, and prints the address where there is no browser."""
    with subprocess.Popen(
        command.split(), cwd=owner.directory, env=owner.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            assert f":{owner.environment['ART_PORT']}" in process.stdout.readline()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.mark.timeout(1500)
def test_every_command_of_the_tutorial_works_as_it_is_printed(
    owner: Owner, tmp_path: Path, art_cache: str
) -> None:
    owner.environment.pop("BASE_MODEL", None)  # the project names it
    owner.environment["ART_CACHE"] = art_cache
    owner.directory = tmp_path
    said: dict[str, str] = {}
    try:
        for printed in typed(PAGE):
            command = as_run_here(printed, owner)
            if command.startswith("cd "):
                owner.directory /= command.removeprefix("cd ")
                use_ports(owner)
            elif command.startswith("launcher open"):
                look_at_the_page(owner, command)
            else:
                # A dry run of an untrained model may find something to say, and says it.
                code = None if "dry-run" in command else 0
                answer = "y\n" if " down" in command else "How much is a lamp?\n"
                said[printed] = owner.run("bash", "-c", command, code=code, typed=answer)
    finally:
        with contextlib.suppress(AssertionError):
            owner.run("launcher", "down", "--local", "--discard", "--yes")
    assert len(said) >= 12
    assert "All 8 epochs:" in said["trainer dry-run finetune.yaml"]
    checkpoints = owner.directory / "checkpoints/demo/models/demo"
    assert (checkpoints / "report.html").is_file()
    assert (owner.directory / "demo-gguf/demo-gguf-Q8_0.gguf").is_file()
    validations = json.loads((owner.directory / ".art/demo/validation_history.json").read_text())
    assert len(validations) == 2  # before the training, and after its one epoch


def use_ports(owner: Owner) -> None:
    """Have the project's config name this test's ports instead of the usual ones."""
    config = owner.directory / "finetune.yaml"
    text = config.read_text()
    for usual, name in (("8000", "ART_OPENAI_PORT"), ("7999", "ART_PORT")):
        assert text.count(usual) == 1
        text = text.replace(usual, owner.environment[name])
    config.write_text(text)
