"""`launcher init`: writes a project that trains at once, and overwrites nothing.

`templates/project/` is the project with every agent, `templates/agents/NAME/` what one agent adds
or replaces. Files of the user are left alone; `.gitignore` and `README.md` only get what they lack.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kit.files import make_private, replace_text
from kit.settings import read_env_file
from launcher.errors import ProjectError

TEMPLATES = Path(__file__).parent / "templates"
EXAMPLE_NAME = "shop-agent"
"""The name in the templates; a project's own takes its place."""
EXAMPLE_DEPENDENCIES = "dependencies = []"
# It names the run on the server, a directory of checkpoints and a Python project.
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
HEADING = "## Train the agent"
AGENTS: dict[str, list[str]] = {
    "python": [],
    "langgraph": ["langgraph>=1", "langchain-openai>=1"],
    "openai-agents": ["openai-agents>=0.4"],
    "pydantic-ai": ["pydantic-ai-slim[openai]>=1"],
    "verifiers": ["verifiers>=0.3,<0.4"],
}
"""The agents, and the packages that each one needs."""
PYPROJECT = "pyproject.toml"
DEPENDENCY_FILES = (PYPROJECT, "requirements.txt", "setup.py", "setup.cfg", "Pipfile", "uv.lock")
# Dots would hide these templates, or make git obey them here.
DOTTED = {"env.example": ".env.example", "gitignore": ".gitignore"}


@dataclass
class Written:
    """The files of a project, by what became of each."""

    written: list[str] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    """Files that have the template's content already."""
    left: list[str] = field(default_factory=list)
    """Files of the user with another content, which were left alone."""


def project_name(directory: Path, name: str | None) -> str:
    """The name of the run: `name`, or the directory's."""
    chosen = name or directory.resolve().name
    if not NAME.fullmatch(chosen):
        raise ProjectError(
            f"`{chosen}` cannot name a run: use letters, digits, `.`, `_` and `-`, at most 64, "
            "with a letter or digit at both ends",
            hint="Choose another name with `--name`",
        )
    return chosen


def files_of(agent: str, name: str) -> dict[str, str]:
    """The files of a new project with their content, by path."""
    if agent not in AGENTS:
        raise ProjectError(
            f"There is no agent `{agent}`", hint=f"Choose one of {', '.join(AGENTS)}"
        )
    files = {}
    for root in (TEMPLATES / "project", TEMPLATES / "agents" / agent):
        for path in _files(root):
            relative = path.relative_to(root)
            target = relative.with_name(DOTTED.get(path.name, path.name)).as_posix()
            files[target] = path.read_text(encoding="utf-8").replace(EXAMPLE_NAME, name)
    lines = "".join(f'    "{package}",\n' for package in AGENTS[agent])
    listed = f"dependencies = [\n{lines}]" if lines else EXAMPLE_DEPENDENCIES
    files[PYPROJECT] = files[PYPROJECT].replace(EXAMPLE_DEPENDENCIES, listed)
    files[".env"] = files[".env.example"]
    return files


def write_project(directory: Path, agent: str, name: str | None = None) -> Written:
    """Write the project into `directory`, which may exist and need not be empty.

    Running it again finishes what was interrupted.
    """
    files, written = files_of(agent, project_name(directory, name)), Written()
    for path in files:
        _check_parents(directory / path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        own = sorted(path.name for path in directory.iterdir() if path.name in DEPENDENCY_FILES)
        if own and own != [PYPROJECT]:
            del files[PYPROJECT]  # the project has another way to name its dependencies
        for path, text in files.items():
            _write(directory / path, path, text, written)
    except OSError as error:
        raise ProjectError(
            f"`{error.filename or directory}` cannot be written: {error.strerror}",
            hint="Check the directory's owner and permissions; then run the same command again",
        ) from error
    return written


def env_without_model(directory: Path, done: Written) -> str | None:
    """The line that a `.env` of the user lacks for the server to load the project's model."""
    if ".env" not in done.left:
        return None
    own = read_env_file(directory / ".env")
    template = (TEMPLATES / "project" / "env.example").read_text(encoding="utf-8").splitlines()
    line = next(line for line in template if line.startswith("BASE_MODEL="))
    return None if "BASE_MODEL" in own else line


def _files(root: Path) -> list[Path]:
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]


def _check_parents(target: Path) -> None:
    """Raise if a file is where a directory must be, before anything is written."""
    for parent in target.parents:
        if os.path.lexists(parent) and not parent.is_dir():
            raise ProjectError(
                f"`{parent}` is a file, and no project can be written into a file",
                hint="Choose another directory, or rename the file",
            )


def _write(target: Path, path: str, text: str, written: Written) -> None:
    """Write one file, or the part of it that a file of the user lacks."""
    if path in _MISSING and (existing := _same_file(target)).is_file():
        old = existing.read_bytes().decode(errors="replace")
        if missing := _MISSING[path](old, text):
            end = "" if old.endswith("\n") or not old else "\n"
            with existing.open("a", encoding="utf-8") as file:
                file.write(f"{end}\n{missing}" if old else missing)
        (written.extended if missing else written.same).append(path)
    elif not os.path.lexists(target):  # a link to nothing is the user's too
        replace_text(target, text)
        if path == ".env":
            make_private(target)  # keys come here
        written.written.append(path)
    elif target.is_file() and target.read_bytes() == text.encode():
        written.same.append(path)
    else:
        written.left.append(path)


def _same_file(target: Path) -> Path:
    """`target`, or the file of that name with other capitals."""
    names = {path.name.lower(): path for path in target.parent.iterdir()}
    return names.get(target.name.lower(), target)


def _missing_lines(old: str, text: str) -> str:
    """The lines of `text`, a `.gitignore`, that `old` has in no form."""
    known = {line.strip().strip("/") for line in old.splitlines()}
    return "".join(
        f"{line}\n" for line in text.splitlines() if line.strip().strip("/") not in known
    )


def _missing_section(old: str, text: str) -> str:
    """The section of `text`, a README, unless `old` has it."""
    return "" if HEADING in old else text[text.index(HEADING) :]


_MISSING: dict[str, Callable[[str, str], str]] = {
    ".gitignore": _missing_lines,
    "README.md": _missing_section,
}
