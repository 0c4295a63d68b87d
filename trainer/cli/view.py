"""`trainer view`: the page of runs that are on this machine."""

import webbrowser
from pathlib import Path

import click

import kit.cli
from kit.errors import ConfigError
from trainer.cli.options import require


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=Path("checkpoints"))
@click.option("--port", type=int, default=0, metavar="PORT", help="Port on loopback.  [any free]")
@click.option("--no-open", is_flag=True, help="Print the address; open no browser.")
def view(directory: Path, port: int, no_open: bool) -> None:
    """Show the runs in DIRECTORY on a page, without a server: pulled runs, or a state directory.

    \b
    Example:
      trainer view checkpoints/
      trainer view .art --port 8123 --no-open
    """
    if not directory.is_dir():
        raise ConfigError(
            f"There is no directory `{directory}`",
            hint="Fetch runs with `launcher pull`, or name a server's `--state-dir`",
        )
    require("fastapi", "uvicorn")
    from trainer.page import view

    bound = view.bind(port)
    bound.listen(64)  # a browser that opens at once waits until the page answers
    address = f"http://{view.HOST}:{bound.getsockname()[1]}/"
    click.echo(address)
    kit.cli.note(f"Showing the runs in `{directory}`; stop with Ctrl-C")
    if not no_open:
        webbrowser.open(address)
    view.serve(directory, bound, version=kit.cli.version())
