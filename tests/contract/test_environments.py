"""The environments resolve to what is pinned, and the pins name no index."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
CRITICAL = ("vllm", "torch", "torchtune", "torchao", "openpipe-art")


def versions(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==([^\s;]+)", text, re.MULTILINE))


def test_the_cluster_environment_resolves_to_its_pins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pins = versions((REQUIREMENTS / "cluster.txt").read_text())
    environment = {k: v for k, v in os.environ.items() if k not in {"UV_FIND_LINKS"}}
    resolution = subprocess.run(
        [
            *("uv", "pip", "compile", "--quiet", "pyproject.toml", "--extra", "cluster"),
            *("--constraints", "requirements/cluster.txt", "--no-header", "--no-annotate"),
            *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert resolution.returncode == 0, resolution.stderr
    resolved = versions(resolution.stdout)
    found = {name: resolved.get(name) for name in CRITICAL}
    with capsys.disabled():
        sys.stdout.write("\ncluster: " + " ".join(f"{k}=={v}" for k, v in found.items()) + "\n")
    assert found == {name: pins[name] for name in CRITICAL}
    assert "skypilot" not in resolved


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.rglob("*.txt")), ids=lambda path: path.stem)
def test_constraints_are_exact_and_name_no_index(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text and "+cpu" not in text and "+cu" not in text
    loose = [line for line in text.splitlines() if line and not re.match(r"[\w.-]+==\S+", line)]
    assert loose == []


def test_every_pin_of_pyproject_is_the_pin_of_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, constraints in (("model", "laptop"), ("model", "cluster"), ("sky", "laptop")):
        pins = versions((REQUIREMENTS / f"{constraints}.txt").read_text())
        exact = versions("\n".join(extras[extra]))
        assert exact and exact.items() <= pins.items()
