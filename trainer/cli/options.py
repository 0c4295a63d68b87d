"""What the commands of `trainer` share: common options, logging, a check for packages."""

import importlib.util
import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kit.errors import NotInstalled
from kit.package_data import how_to_install

state_dir = click.option(
    "--state-dir",
    type=Path,
    default=Path(".art"),
    show_default=True,
    help="The server's state directory.",
)
overrides = click.option(
    "-o",
    "--override",
    "overrides",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUE",
    help="Override one value of the file; may be repeated.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def config_file(command: Callable[..., None]) -> Callable[..., None]:
    """Add the config file: an argument, or as in NVIDIA's guide `--config_file`."""

    @click.argument("config", required=False, type=Path, metavar="CONFIG")
    @click.option(
        "--config_file",
        "--config-file",
        "option",
        type=Path,
        metavar="YAML",
        help="The same as CONFIG, the YAML of the workflow and its training.",
    )
    @wraps(command)
    def with_config(config: Path | None, option: Path | None, **rest: Any) -> None:
        if config is not None and option is not None:
            raise click.UsageError(f"The config is named twice: `{config}` and `{option}`")
        if config is None and option is None:
            raise click.UsageError("Name the config file, such as `finetune.yaml`")
        command(config_file=config or option, **rest)

    return with_config


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request to vLLM


def require(*packages: str) -> None:
    """Raise an error with a hint if a package is missing, without importing it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise NotInstalled(
            f"This command needs {names}, which is not installed",
            hint=f"{how_to_install('local')}, or on a GPU machine: {how_to_install('cluster')}",
        )
