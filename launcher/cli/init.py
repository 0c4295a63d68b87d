"""`launcher init`: a project that trains at once."""

from pathlib import Path

import click

from kit.cli import data, note
from launcher.cli.reports import as_json
from launcher.init import AGENTS, env_without_model, files_of, project_name, write_project


@click.command()
@click.option("--agent", metavar="NAME", help=f"One of {', '.join(AGENTS)}.  [python]")
@click.option("--name", metavar="NAME", help="Name of the run.  [the directory's]")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@as_json
@click.argument("directory", type=Path, default=Path("."), metavar="[DIR]")
def init(directory: Path, agent: str | None, name: str | None, yes: bool, as_json: bool) -> None:
    """Write an agent, its reward, data and config into DIR.

    DIR is the current directory by default; it may be new, empty or an existing project. Files that
    exist are left alone. Run the same command again to finish what was interrupted.

    \b
    Example:
      launcher init demo --yes
      launcher init --agent langgraph
    """
    name = project_name(directory, name)
    if not yes:
        agent = agent or click.prompt(
            "Agent to start from", type=click.Choice(list(AGENTS)), default="python", err=True
        )
        files = files_of(agent, name)
        note("\n".join(f"  {path}" for path in sorted(files)))
        click.confirm(
            f"Write these {len(files)} files to `{directory}`, except those that exist?",
            abort=True,
            err=True,
        )
    agent = agent or "python"
    done = write_project(directory, agent, name)
    if as_json:
        data({"name": name, "agent": agent, **vars(done)})
    for text, paths in (
        ("Wrote", done.written),
        ("Added lines to", done.extended),
        ("Already complete", done.same),
        ("Left alone, because it has another content", done.left),
    ):
        for path in paths:
            note(f"{text}: {path}")
    if AGENTS[agent] and "pyproject.toml" not in done.written + done.same:
        note(f"Add to your project's dependencies: {' '.join(AGENTS[agent])}")
    if line := env_without_model(directory, done):
        note(
            f"Add `{line}` to your `.env`: the server must load the model that finetune.yaml names"
        )
    if directory != Path("."):
        note(f"Next: `cd {directory}`")
    note("Next: `launcher up --local`, then `trainer finetune finetune.yaml`")
