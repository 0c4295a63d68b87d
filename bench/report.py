"""Formats benchmark results as tables, with a description of the machine."""

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Table:
    """A Markdown table with aligned columns."""

    def __init__(self, heads: Sequence[str]) -> None:
        self._rows = [list(heads)]

    def add(self, row: Sequence[str]) -> None:
        self._rows.append(list(row))

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in self._rows) for i in range(len(self._rows[0]))]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
            for row in self._rows
        ]  # fmt: skip
        return "\n".join(
            [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]
        )


SERVER = ("torch", "fastapi", "uvicorn")


def machine(load: float, packages: Sequence[str] = SERVER) -> str:
    """One line with the machine, its load before the run, package versions and the date."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}, load {load:.1f} "
        f"before the run; Python {platform.python_version()}, {versions}; "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    )


def version(package: str) -> str:
    """The version of an installed package. vLLM may be in another environment."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from another environment"


def write_report(
    name: str,
    what: str,
    table: Table | str,
    load: float,
    notes: str = "",
    packages: Sequence[str] = SERVER,
) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = f"# bench/{name}.py\n\n{what}.\n\n{table}\n\n{machine(load, packages)}\n"
    (RESULTS / f"{name}.md").write_text(text + (f"\n{notes.strip()}\n" if notes else ""))
