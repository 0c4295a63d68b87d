"""`launcher tasks`: the tasks that come with the kit."""

import click

from kit.cli import data
from launcher.cli.reports import as_json


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def tasks(context: click.Context, as_json: bool) -> None:
    """List the tasks that come with the kit.

    `launcher up NAME` launches one, with the current directory as its workdir.

    \b
    Example:
      launcher tasks
      launcher tasks --json
      launcher tasks show art-cpu > my.yaml
    """
    from launcher import packaged

    if context.invoked_subcommand is not None:
        return
    found = {name: packaged.summary(path) for name, path in packaged.tasks().items()}
    if as_json:
        data([{"name": name, "summary": text} for name, text in found.items()])
        return
    for name, text in found.items():
        click.echo(f"{name}\t{text}")


@tasks.command()
@click.argument("name", metavar="NAME")
def show(name: str) -> None:
    """Print the file of a task, to start your own from.

    \b
    Example:
      launcher tasks show art > my.yaml
    """
    from launcher import packaged

    click.echo(packaged.find_task(name).read_text(encoding="utf-8"), nl=False)
