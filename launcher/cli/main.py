"""`launcher`: the program on the laptop. Commands parse, call and print; nothing else.

This module has the commands that change a cluster. Those for runs are in `runs`, and those that
report on a cluster in `reports`.
"""

import contextlib
import os
import sys
from pathlib import Path

import click

import kit.cli
from kit.cli import data, note
from launcher.cli.reports import (
    as_json,
    cost,
    doctor,
    dollars,
    logs,
    ls,
    megabytes,
    progress_bar,
    pull,
    save_to,
    summarize,
)
from launcher.cli.runs import cancel, run
from launcher.cli.target import Target, on_cluster

LARGE = 200_000_000
"""Size of a workdir, in bytes, above which `sync` warns."""
SHOWN = 20
"""How many sent and how many removed files `sync` lists."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kit.cli.version(), prog_name="launcher")
def cli() -> None:
    """Rent a cluster, train on it, pull the checkpoints, tear it down.

    \b
    Example:
      launcher up sky/art-cpu.yaml
      launcher tunnel
      launcher pull
      launcher down
    """


@cli.command(context_settings={"ignore_unknown_options": True})
@on_cluster
@click.option(
    "--env", "envs", multiple=True, metavar="NAME[=VALUE]", help="Set a variable of the task."
)
@click.option("--max-hours", type=click.FloatRange(0), metavar="HOURS", help="Run this long.  [8]")
@click.option(
    "--idle-minutes",
    type=click.FloatRange(0),
    metavar="MINUTES",
    help="Exit when idle this long.  [30]",
)
@click.option(
    "--max-cost",
    type=click.FloatRange(0, min_open=True),
    metavar="DOLLARS",
    help="Spend at most this much.",
)
@click.option("--no-lease", is_flag=True, help="Run, and cost money, until `launcher down`.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TASK] [SKY ARGUMENT]...")
def up(
    target: Target,
    envs: tuple[str, ...],
    max_hours: float | None,
    idle_minutes: float | None,
    max_cost: float | None,
    no_lease: bool,
    arguments: tuple[str, ...],
) -> None:
    """Bring a cluster up with TASK and wait until its server is healthy.

    TASK is `sky/art.yaml` by default, or `sky/art-cpu.yaml` with --local. All other arguments go
    to `sky launch`, and the variables of --env-file also go to the task. Safe to repeat.

    The cluster stops itself at the end of its lease: after --max-hours, when idle, or at
    --max-cost. `.env` can change the defaults.

    \b
    Example:
      launcher up
      launcher up sky/art-cpu.yaml -c rehearsal --infra slurm
      launcher up --local --env BASE_MODEL=tiny-random
      launcher up --max-cost 20
    """
    from launcher.lease import Lease
    from launcher.task import Task

    cluster = target.cluster
    path, rest = _split(arguments, target.local)
    lease = Lease(max_hours, idle_minutes, max_cost, no_lease)
    task = Task.load(
        path,
        cluster.settings,
        env_file=target.env_file,
        envs=dict(map(_assignment, envs)),
        lease=lease,
    )
    options = [*lease.options, *(["--env"] if envs else [])]
    log = None if target.local else sys.stderr
    if not cluster.up(task, rest, progress=note, log=log, options=options):
        note("Nothing was launched")
        return
    where = target.options
    note(f"Cluster `{cluster.name}` is up and its server is healthy")
    if not target.local:
        note(f"Log in with `ssh {cluster.name}`")
        note(f"End it with `launcher down{where}`, which pulls first; `sky down` does not")
    note(f"Next: `launcher tunnel{where}`, then train and `launcher pull{where}`")


@cli.command()
@on_cluster
@as_json
@click.argument("workdir", type=Path, default=Path("."), metavar="[DIR]")
def sync(target: Target, as_json: bool, workdir: Path) -> None:
    """Update the cluster's copy of DIR.

    DIR is the current directory by default. Sends changed files and deletes those that no longer
    exist here. Skips the files in `.gitignore`, or in `.skyignore` if there is one. Keeps files
    that the cluster created.

    \b
    Example:
      launcher sync
      launcher sync --json
    """
    from launcher.files import file_sizes, select

    files = select(workdir)
    sizes = file_sizes(workdir, files)
    if sum(sizes.values()) > LARGE:
        largest = max(sizes, key=lambda name: sizes[name])
        note(
            f"warning: `{workdir}` is {megabytes(sum(sizes.values()))}, `{largest}` alone "
            f"{megabytes(sizes[largest])}; exclude files with `.gitignore` or `.skyignore`"
        )
    sent = target.cluster.sync(workdir, files)
    if as_json:
        data(vars(sent))
    for sign, names in (("+", sent.files), ("-", sent.removed)):
        for name in names[:SHOWN]:
            note(f"{sign} {name}")
        if len(names) > SHOWN:
            note(f"{sign} … and {len(names) - SHOWN} more")
    note(f"Sent {len(sent.files)} files ({megabytes(sent.bytes)}), removed {len(sent.removed)}")


@cli.command()
@on_cluster
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="PORT", help="Local port of the control API."
)
@click.option(
    "--openai-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Local port of the OpenAI API.",
)
@as_json
def tunnel(target: Target, port: int | None, openai_port: int | None, as_json: bool) -> None:
    """Forward the server's two ports to this machine.

    Prints the environment variables for clients once the server answers, and runs until you press
    Ctrl-C. Do not change --openai-port for openpipe-art: it connects to the port that the server
    reports.

    \b
    Example:
      launcher tunnel
      launcher tunnel --port 17999 --openai-port 18000
    """
    from launcher.endpoints import wait_until_healthy, wait_while_healthy

    cluster = target.cluster
    ports = cluster.ports
    with cluster.tunnel(port or ports[0], openai_port or ports[1]) as endpoints:
        wait_until_healthy(endpoints, cluster.name)
        if as_json:
            data({**vars(endpoints), "variables": endpoints.exports()})
        else:
            for variable, value in endpoints.exports().items():
                click.echo(f"export {variable}={value}")
        sys.stdout.flush()
        note("The tunnel is open; press Ctrl-C to close it")
        with contextlib.suppress(KeyboardInterrupt):
            wait_while_healthy(endpoints, cluster.name)


@cli.command()
@on_cluster
@save_to
@click.option("--discard", is_flag=True, help="Do not pull the checkpoints first.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@as_json
def down(target: Target, to: Path, discard: bool, yes: bool, as_json: bool) -> None:
    """Pull the checkpoints, then tear the cluster down.

    Stops if a checkpoint is damaged or cannot be pulled; --discard skips the pull. Shows what the
    cluster cost. Safe to repeat, and on a cluster that was not fully created.

    \b
    Example:
      launcher down
      launcher down -c art --discard --yes
    """
    cluster = target.cluster
    loss = " and lose the checkpoints that were not pulled" if discard else ""
    if not yes:
        click.confirm(f"Tear down cluster `{cluster.name}`{loss}?", abort=True, err=True)
    with progress_bar() as progress:
        pulled, spent = cluster.down(None if discard else to, progress=progress)
    if as_json:
        costs = vars(spent) if spent else None
        data({"pulled": [vars(checkpoint) for checkpoint in pulled], "cost": costs})
    if pulled or not discard:
        summarize(pulled, to)
    note(f"Cluster `{cluster.name}` is gone" + (f"; {dollars(spent)}" if spent else ""))


def _split(arguments: tuple[str, ...], local: bool) -> tuple[Path, list[str]]:
    """Split `arguments` into the task and those for `sky launch`."""
    positional, options = list(arguments), list[str]()
    if any(argument.startswith("-") for argument in arguments):
        if local:
            return Path("sky/art-cpu.yaml"), list(arguments)  # the provider names and refuses them
        from launcher.skypilot.door import split_arguments

        positional, options = split_arguments(arguments)
    if len(positional) > 1:
        raise click.UsageError(f"`{positional[1]}` is a second task: give only one")
    default = "sky/art-cpu.yaml" if local else "sky/art.yaml"
    return Path(positional[0] if positional else default), options


def _assignment(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE as `sky launch` does: NAME alone takes its value from the environment."""
    name, separator, value = text.partition("=")
    if not name.isidentifier():
        raise click.BadParameter(f"`{text}` is not NAME=VALUE", param_hint="--env")
    if not separator and name not in os.environ:
        raise click.BadParameter(
            f"`{name}` is not set in the environment: set it there, or give `{name}=VALUE`",
            param_hint="--env",
        )
    return name, value if separator else os.environ[name]


for _command in (run, cancel, ls, logs, pull, cost, doctor):
    cli.add_command(_command)


def main() -> None:
    kit.cli.run(cli, "launcher")
