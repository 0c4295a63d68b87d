"""The commands of `trainer` that show a run without a browser: `watch` and `report`."""

import os
from pathlib import Path

import click

import kit.cli
from trainer.cli.options import as_json, state_dir


@click.command()
@click.argument("run", required=False)
@state_dir
@click.option("--url", metavar="URL", help="Control port of a server, instead of a directory.")
@click.option("--once", is_flag=True, help="Show it once and exit.")
def watch(run: str | None, state_dir: Path, url: str | None, once: bool) -> None:
    """Follow RUN in the terminal: verdict, steps, reward and signal. The newest run by default.

    Redraws in place on a terminal; a pipe gets a line per step. The key of a server is read from
    ART_API_KEY. Runs until you press Ctrl-C.

    \b
    Example:
      trainer watch
      trainer watch my_project/my_run --state-dir checkpoints
      trainer watch --url http://127.0.0.1:7999
    """
    from rich.console import Console

    from trainer.page.watch import OnDisk, OnServer, Source, watch

    source: Source = OnServer.find(url, run) if url else OnDisk.find(state_dir, run)
    # `force_terminal` of the environment apart, rich looks at stdout itself.
    console = Console(no_color=bool(os.environ.get("NO_COLOR")) or None, highlight=False)
    try:
        watch(source, console, once=once)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(0) from None


@click.command()
@click.argument("run", required=False)
@state_dir
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File to write.",
)
@as_json
def report(run: str | None, state_dir: Path, output: Path, as_json: bool) -> None:
    """Write a report of RUN as one HTML file that needs no network. The newest run by default.

    \b
    Example:
      trainer report my_project/my_run
      trainer report my_run --state-dir checkpoints -o my_run.html
    """
    from trainer.errors import storage_error
    from trainer.page.report import write_report
    from trainer.runs import find_run

    found = find_run(state_dir, run)
    try:
        path = write_report(found.directory, output)
    except OSError as error:
        raise storage_error(error, f"The report `{output}` cannot be written") from error
    if as_json:
        kit.cli.data({"report": str(path)})
    else:
        click.echo(path)
    kit.cli.note("Open it in a browser, or send it: everything is in the file")
