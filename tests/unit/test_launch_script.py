"""`launch-cluster.sh`, called from any directory."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch-cluster.sh"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script in a checkout whose `launcher` prints its directory and arguments."""
    checkout = tmp_path / "checkout"
    for name, text in (("scripts/install", ""), (".venv/bin/launcher", 'pwd; printf "%s\\n" "$@"')):
        program = checkout / name
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    (checkout / "sky").mkdir()
    (checkout / "sky" / "art.yaml").touch()
    return Path(shutil.copy(SCRIPT, checkout))


def call(script: Path, at: Path, *arguments: str) -> list[str]:
    command = [str(script), *arguments]
    return subprocess.run(
        command, cwd=at, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_files_of_the_caller_are_found_from_any_directory(script: Path, tmp_path: Path) -> None:
    mine = tmp_path / "my tasks"
    mine.mkdir()
    for name in ("one.yaml", "prod.env", "art"):
        (mine / name).touch()
    given = ("-c", "art", "one.yaml", "--env-file", "prod.env", "--infra", "slurm/lab")
    home, *arguments = call(script, mine, *given)
    assert Path(home) == script.parent
    absolute = (f"{mine}/one.yaml", "--env-file", f"{mine}/prod.env")
    assert arguments == ["up", "-c", "art", *absolute, "--infra", "slurm/lab"]
    # The caller has no such file, so it is the checkout's.
    assert call(script, mine, "sky/art.yaml")[1:] == ["up", "sky/art.yaml"]
    assert call(script, mine, f"{mine}/one.yaml")[1:] == ["up", f"{mine}/one.yaml"]
    assert call(script, mine)[1:] == ["up"]
    assert call(script, script.parent, "sky/art.yaml")[1:] == ["up", "sky/art.yaml"]
