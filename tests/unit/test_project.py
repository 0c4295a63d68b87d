"""The project before a launch: its dependencies, its Python, its size, what is sent of it."""

import subprocess
from pathlib import Path

import pytest

from launcher import project
from launcher.errors import ProjectError
from launcher.files import sendable
from launcher.project import check_dependencies, size_warning
from launcher.startup import quoted

NO_SOLUTION = """error: No solution found when resolving dependencies
  cause: Because m depends on pydantic<2 and pydantic>2, your requirements are unsatisfiable."""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `uv` that records its arguments and says what the file `says` has."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uv").write_text(
        f'#!/bin/sh\necho "$@" >{programs}/asked\n[ ! -f {programs}/says ] || '
        f"{{ cat {programs}/says >&2; exit 1; }}\n"
    )
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return programs


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def told(directory: Path) -> list[str]:
    messages: list[str] = []
    check_dependencies(directory, "kit", messages.append)
    return messages


def test_dependencies_that_do_not_resolve_stop_the_launch(uv: Path, mine: Path) -> None:
    (mine / "pyproject.toml").write_text('[project]\nname = "m"\n')
    (mine / "requirements.txt").write_text("httpx\n")
    assert told(mine) == []
    asked = (uv / "asked").read_text()
    assert "--python-version=3.12" in asked and asked.endswith("pyproject.toml requirements.txt\n")
    (uv / "says").write_text(NO_SOLUTION)
    with pytest.raises(ProjectError, match=r"do not resolve for Python 3\.12") as error:
        told(mine)
    assert "pydantic>2" in error.value.message and "Nothing was launched" in error.value.hint


def test_what_cannot_be_checked_is_said_and_stops_nothing(
    uv: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no pyproject.toml, uv.lock or requirements.txt" in told(mine)[0]
    (mine / "pyproject.toml").write_text('[project]\nname = "m"\n')
    (uv / "says").write_text("error: Failed to fetch: https://pypi.org/simple/httpx/\n")
    assert told(mine) == [
        "The project's dependencies were not checked: "
        "error: Failed to fetch: https://pypi.org/simple/httpx/"
    ]
    (uv / "says").write_text(f"{NO_SOLUTION}\n\nhint: ... because the network was disabled.\n")
    assert "were not checked" in told(mine)[0]
    monkeypatch.setattr(project.shutil, "which", lambda *_, **__: None)
    assert "`uv` is not installed here" in told(mine)[0]
    (mine / "pyproject.toml").write_text("[tool.ruff]\n")
    assert "no table `[project]`" in told(mine)[0]
    (mine / "pyproject.toml").write_text("[project\n")
    with pytest.raises(ProjectError, match=r"pyproject\.toml` cannot be read"):
        told(mine)


@pytest.mark.parametrize(
    ("requires", "minor"),
    [("", 12), (">=3.9", 12), (">=3.13", 13), ("<3.12,>=3.10", 11), ("==3.9.*", 9), ("~=3.10", 12)],
)
def test_the_python_of_the_project_is_asked_for(
    requires: str, minor: int, uv: Path, mine: Path
) -> None:
    (mine / "pyproject.toml").write_text(f'[project]\nname = "m"\nrequires-python = "{requires}"\n')
    messages = told(mine)
    assert f"--python-version=3.{minor} " in (uv / "asked").read_text()
    assert bool(messages) == (minor < 11)
    if messages:
        assert messages[0].startswith("The project needs Python 3.9 and the kit 3.11 or later")


def test_a_large_workdir_is_told_by_its_largest_folders(mine: Path) -> None:
    sizes = {"data/a.bin": 3 * 10**9, "data/b/c.bin": 10**9, "model.gguf": 10**9, "agent.py": 900}
    warning = size_warning(mine, sizes)
    assert warning and "with 5.0 GB: `data/` 4.0 GB, `model.gguf` 1.0 GB." in warning
    assert warning.endswith("a line such as `/data/` in `.gitignore`")
    (mine / ".skyignore").touch()
    assert ".skyignore" in str(size_warning(mine, sizes))
    assert size_warning(mine, {"agent.py": 900}) is None


def test_outside_a_repository_skypilot_gets_only_the_files_that_are_not_ignored(mine: Path) -> None:
    for name in (".env", ".venv/lib/x.py", "data/big.bin", "agent/main.py"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text(name)
    (mine / ".gitignore").write_text("/data/\n.env\n")
    (mine / "link.py").symlink_to("agent/main.py")

    def sent() -> set[str]:
        found = Path(sendable("art", mine))
        return {str(it.relative_to(found)) for it in found.rglob("*") if not it.is_dir()}

    assert sent() == {".gitignore", "agent/main.py", "link.py"}
    (mine / "agent/main.py").rename(mine / "agent/other.py")
    assert sent() == {".gitignore", "agent/other.py", "link.py"}
    subprocess.run(["git", "init", "--quiet", str(mine)], check=True)
    assert sendable("art", mine) == str(mine)


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            f"Installing into .venv\n(art, pid=12) collecting\n{NO_SOLUTION}\n"
            "error: The dependencies of the project cannot be installed\nThe setup failed with 1",
            f"{NO_SOLUTION}\nerror: The dependencies of the project cannot be installed",
        ),
        (
            "(art, pid=12) bash: line 2: scripts/install: No such file or directory\n"
            "(art, pid=12) The setup failed with code 127",
            "bash: line 2: scripts/install: No such file or directory",
        ),
        ("The setup failed with code 3", ""),
    ],
)
def test_a_failed_setup_is_quoted_where_it_says_why(log: str, shown: str) -> None:
    lines = quoted(log.splitlines()).splitlines()[1:]
    assert [line.removeprefix("  ") for line in lines] == shown.splitlines()
