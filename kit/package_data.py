"""Where the files lie that come with the kit and are not modules: tasks, pins, scripts, examples.

In a clone they are in its root (`sky/`, `requirements/`, `scripts/`, `examples/`). The wheel has
the same files in `kit/data/`; `pyproject.toml` lists them.
"""

import tomllib
from pathlib import Path

NAME = "art-cluster"
"""The name of the kit as a distribution."""
DATA = "kit/data"
"""The folder of the data in a wheel."""
_PACKAGES = Path(__file__).resolve().parents[1]  # the root of a clone, or `site-packages`


def root() -> Path:
    """The folder that has `sky/`, `requirements/`, `scripts/` and `examples/`."""
    return clone() or _PACKAGES / DATA


def how_to_install(extra: str) -> str:
    """A hint that names an extra of the kit: by the clone's script, or for the installed wheel."""
    if clone() is None:
        return f"Install `{NAME}[{extra}]` from the wheel or URL that the kit was installed from"
    return f"Run `scripts/install{f' --only {extra}' if extra == 'cluster' else ''}`"


def clone() -> Path | None:
    """The clone whose code is running, or None if the kit is installed."""
    return _PACKAGES if is_clone(_PACKAGES) else None


def is_clone(directory: Path) -> bool:
    """Whether a directory holds the source of the kit."""
    try:
        project = tomllib.loads((directory / "pyproject.toml").read_text()).get("project")
    except (OSError, ValueError):
        return False
    return isinstance(project, dict) and project.get("name") == NAME
