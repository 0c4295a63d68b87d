"""What both command lines share: how errors, notes and JSON reach the person or the pipe.

stdout is data, stderr is for people. Exit codes: 0 done, 1 our error, 2 usage.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from kit.errors import KitError


def version() -> str:
    """The installed version; the code may also run from a bare checkout on the path."""
    try:
        return importlib.metadata.version("art-cluster")
    except importlib.metadata.PackageNotFoundError:
        return "0.dev"


def note(message: str) -> None:
    """Tell the person something, on stderr."""
    click.echo(message, err=True, color=_color())


def data(value: Any) -> None:
    """Print `value` as JSON on stdout."""
    click.echo(json.dumps(value, indent=2, default=str))


def _color() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None


def show_error(error: KitError) -> None:
    note(click.style("error", fg="red", bold=True) + f": {error.message}")
    if error.hint:
        note("\n" + click.style("hint", fg="cyan", bold=True) + f": {error.hint}")


def run(command: Callable[..., Any], name: str) -> None:
    """Run a click command as a program: every KitError becomes a sentence, a hint and exit 1."""
    try:
        command(prog_name=name)
    except KitError as error:
        show_error(error)
        sys.exit(1)
