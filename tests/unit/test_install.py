"""`scripts/install`: a local cluster links the launcher's packages instead of installing them.

A fake `uv` stands in for the real one: it creates environments, and installs three modules.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.local.provider import SEED_ENVIRONMENT, LocalProvider
from launcher.settings import Settings
from launcher.task import Task

ROOT = Path(__file__).parents[2]
PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
UV = rf"""#!/bin/bash
set -e
case "$1" in
  python) echo {Path(sys.executable).resolve()} ;;
  venv) {Path(sys.executable).resolve()} -m venv --without-pip --clear .venv ;;
  pip) cd .venv/{PACKAGES}
    for package in click torch; do
      [ -f $package.py ] || {{ touch $package.py; echo "$package" >>"$OLDPWD/installed.log"; }}
    done
    rm -f ours.pth; echo "$OLDPWD" >ours.pth ;;
esac
"""
TASK = """
name: demo
workdir: clone
setup: scripts/install --only local
run: .venv/bin/python -c 'import ours, sys, torch; print(ours.__file__, torch.__file__)'
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with an installed environment, and the fake `uv` on the path."""
    clone, programs = tmp_path / "clone", tmp_path / "programs"
    (clone / "requirements").mkdir(parents=True)
    (clone / "requirements" / "laptop.txt").write_text("torch==1\n")
    (clone / "pyproject.toml").write_text("[project]\n")
    (clone / "ours.py").touch()
    (clone / ".gitignore").write_text(".venv/\ninstalled.log\n")
    (clone / "scripts").mkdir()
    for name in ("install", "link-environment"):
        shutil.copy(ROOT / "scripts" / name, clone / "scripts")
    programs.mkdir()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("UV_FIND_LINKS", "/nowhere")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    install(clone)
    script = clone / ".venv/bin/tool"
    script.write_text(f"#!{clone}/.venv/bin/python\nimport sys; print(sys.prefix)\n")
    script.chmod(0o755)
    return clone


def install(checkout: Path, *extras: str, seed: Path | None = None) -> str:
    """Run `scripts/install` and return what it wrote for people."""
    environment = {**os.environ, **({SEED_ENVIRONMENT: str(seed)} if seed else {})}
    done = subprocess.run(
        [checkout / "scripts/install", *extras], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def copy_of(clone: Path) -> Path:
    ignore = shutil.ignore_patterns(".venv", "installed.log")
    return Path(shutil.copytree(clone, clone.with_name("copy"), ignore=ignore))


def files(environment: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in environment.rglob("*") if path.is_file()}


def python(checkout: Path, code: str) -> str:
    command = [str(checkout / ".venv/bin/python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_an_environment_of_the_same_pins_is_linked_and_runs_its_own_code(clone: Path) -> None:
    copy = copy_of(clone)
    assert "linked" in install(copy, "--only", "local", seed=clone / ".venv")
    assert not (copy / "installed.log").exists()
    assert (copy / f".venv/{PACKAGES}/torch.py").samefile(clone / f".venv/{PACKAGES}/torch.py")
    assert python(copy, "import ours; print(ours.__file__)") == str(copy / "ours.py")
    assert python(clone, "import ours; print(ours.__file__)") == str(clone / "ours.py")
    tool = subprocess.run([copy / ".venv/bin/tool"], check=True, capture_output=True, text=True)
    assert tool.stdout.strip() == str(copy / ".venv")
    assert "up to date" in install(copy, "--only", "local", seed=clone / ".venv")


def test_another_pin_or_a_missing_package_is_installed(clone: Path) -> None:
    copy = copy_of(clone)
    (copy / "requirements/laptop.txt").write_text("torch==2\n")
    before = files(clone / ".venv")
    assert "linked" not in install(copy, "--only", "local", seed=clone / ".venv")
    assert (copy / "installed.log").read_text().split() == ["click", "torch"]
    assert files(clone / ".venv") == before
    shutil.rmtree(copy)

    copy = copy_of(clone)
    (clone / f".venv/{PACKAGES}/torch.py").unlink()  # `uv sync` removes it
    assert "linked" in install(copy, "--only", "local", seed=clone / ".venv")
    assert (copy / "installed.log").read_text().split() == ["torch"]
    assert not (clone / f".venv/{PACKAGES}/torch.py").exists()


def test_each_environment_outlives_the_other(clone: Path) -> None:
    copy = copy_of(clone)
    before = files(clone / ".venv")
    install(copy, "--only", "local", seed=clone / ".venv")
    shutil.rmtree(copy / ".venv")
    assert files(clone / ".venv") == before
    install(copy, "--only", "local", seed=clone / ".venv")
    shutil.rmtree(clone)
    assert python(copy, "import torch; print(torch.__file__)").startswith(str(copy))


def test_packages_that_cannot_be_linked_are_installed(clone: Path) -> None:
    copy = copy_of(clone)
    shutil.rmtree(clone / f".venv/{PACKAGES}")
    assert "cannot be linked" in install(copy, "--only", "local", seed=clone / ".venv")
    assert (copy / "installed.log").read_text().split() == ["click", "torch"]


def test_a_local_cluster_starts_from_the_launchers_environment_and_down_leaves_that_whole(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone.parent)
    monkeypatch.setattr(sys, "prefix", str(clone / ".venv"))
    Path("task.yaml").write_text(TASK)
    before = files(clone / ".venv")
    provider = LocalProvider(clone.parent / "clusters")
    run = provider.launch("art", Task.load(Path("task.yaml"), Settings()), [])
    assert run is not None
    while not provider.runs("art")[0].status.over:
        time.sleep(0.05)
    workdir = provider.workdir("art")
    log = (clone.parent / "clusters/art/runs/1/log").read_text()
    assert log.endswith(f"{workdir}/ours.py {workdir}/.venv/{PACKAGES}/torch.py\n"), log
    assert not (workdir / "installed.log").exists()
    provider.down("art")
    assert files(clone / ".venv") == before
