"""Output of both command lines: errors and notes for people, JSON for programs.

stdout is data, stderr is for people. Exit codes: 0 done, 1 our error, 2 usage.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from kit.errors import KitError
from kit.version import version as version


def note(message: str) -> None:
    """Print a message for people, on stderr."""
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
    """Run a click command as a program: a KitError prints its message and hint, and exits 1."""
    try:
        command(prog_name=name)
    except KitError as error:
        show_error(error)
        sys.exit(1)
