"""`launcher`: the program on the laptop. Commands parse, call and print; nothing else.

This module has the commands that change a cluster. Those for runs are in `runs`, those that
report on a cluster in `reports`, and those that bring its server here in `tunnel`.
"""

import os
import signal
import sys
from pathlib import Path

import click

import kit.cli
from kit.cli import data, note
from kit.state_dir import names_in_path
from launcher.cli.init import init
from launcher.cli.machines import options_for
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
from launcher.cli.tasks import tasks
from launcher.cli.tunnel import open_page, tunnel
from launcher.cli.workers import WorkerOptions, with_workers

SHOWN = 20
"""How many sent and how many removed files `sync` lists."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kit.cli.version(), prog_name="launcher")
def cli() -> None:
    """Rent a cluster, train on it, pull the checkpoints, tear it down.

    \b
    Example:
      launcher up art-cpu
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
@click.option(
    "--for", "model", metavar="MODEL", help="Load MODEL, on the cheapest GPUs that hold it."
)
@click.option(
    "--from",
    "checkpoint",
    type=Path,
    metavar="DIR",
    help="Serve the pulled checkpoint in DIR, and train nothing.",
)
@with_workers
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TASK] [SKY ARGUMENT]...")
def up(
    target: Target,
    envs: tuple[str, ...],
    max_hours: float | None,
    idle_minutes: float | None,
    max_cost: float | None,
    no_lease: bool,
    model: str | None,
    checkpoint: Path | None,
    workers: WorkerOptions,
    arguments: tuple[str, ...],
) -> None:
    """Bring a cluster up with TASK and wait until its server is healthy.

    TASK is a file, or the name of a task in `launcher tasks`; by default `art`, or `art-cpu` with
    --local. The current directory goes to the cluster as its workdir, and the dependencies of the
    project in it get an environment beside the server's. All other arguments go to `sky launch`,
    and the variables of --env-file also go to the task. Safe to repeat.

    The cluster stops itself at the end of its lease: after --max-hours, when idle, or at
    --max-cost. `.env` can change the defaults.

    --workers adds machines to a server on Ray, or removes them while it runs. Without TASK the
    server is then `art-multi-node` on one machine. The workers end with the server.

    \b
    Example:
      launcher up
      launcher up art-cpu -c rehearsal --infra slurm
      launcher up --local --env BASE_MODEL=tiny-random
      launcher up --for Qwen/Qwen2.5-7B-Instruct --max-cost 20
      launcher up --workers 3 --spot
      launcher up --local --from checkpoints/demo/models/demo/checkpoints/0008
    """
    from launcher.checkpoints import base_model_of, with_checkpoint
    from launcher.lease import Lease
    from launcher.packaged import find_task
    from launcher.task import Task

    cluster = target.cluster
    default = workers.default_task or ("sky/art-cpu.yaml" if target.local else "sky/art.yaml")
    given_task, rest = _split(arguments, target.local)
    path = find_task(given_task or default)
    workers.check(target, path, max_cost)
    planned: dict[str, str] = {}
    given = dict(map(_assignment, envs))
    if (model or checkpoint) and "BASE_MODEL" in given:
        flag = "--for" if model else "--from"
        raise click.UsageError(f"`{flag}` sets BASE_MODEL: remove it from `--env`")
    if checkpoint is not None:
        planned["BASE_MODEL"] = base_model_of(checkpoint)
        if model not in (None, planned["BASE_MODEL"]):
            base = planned["BASE_MODEL"]
            raise click.UsageError(f"`{checkpoint}` was trained from `{base}`: use `--for {base}`")
    if model is not None:
        gpus, planned = options_for(target, model, rest)
        rest += gpus
    lease = Lease(max_hours, idle_minutes, max_cost, no_lease)
    task = Task.load(
        path,
        cluster.settings,
        env_file=target.env_file,
        envs={**planned, **given},
        lease=lease,
    )
    if workers.count is not None and given_task is None:
        task = workers.on_one_machine(task)
    if checkpoint is not None:
        task = with_checkpoint(task, checkpoint)
    flags = {"--env": envs, "--for": model, "--from": checkpoint}
    options = [*lease.options, *(flag for flag, value in flags.items() if value)]
    log = None if target.local else sys.stderr
    # Like Ctrl-C: the launch says what it leaves behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not cluster.up(task, rest, progress=note, log=log, options=options):
        note("Nothing was launched")
        return
    where = target.options
    workers.apply(target)
    note(f"Cluster `{cluster.name}` is up and its server is healthy")
    if not target.local:
        note(f"Log in with `ssh {cluster.name}`")
        note(f"End it with `launcher down{where}`, which pulls first; `sky down` does not")
    if checkpoint is not None:
        note(f"Next: `launcher tunnel{where}`, then `trainer chat {names_in_path(checkpoint)[1]}`")
    else:
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
    from launcher.project import size_warning

    files = select(workdir)
    if warning := size_warning(workdir, file_sizes(workdir, files)):
        note(warning)
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
@save_to
@click.option("--discard", is_flag=True, help="Do not pull the checkpoints first.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@as_json
def down(target: Target, to: Path, discard: bool, yes: bool, as_json: bool) -> None:
    """Pull the checkpoints, then tear the cluster down.

    Stops if a checkpoint is damaged or cannot be pulled; --discard skips the pull. Shows what the
    cluster cost, and writes a report beside the checkpoints of each run. Safe to repeat, and on a
    cluster that was not fully created.

    \b
    Example:
      launcher down
      launcher down -c art --discard --yes
    """
    from launcher.report import write_reports

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
    # After the teardown: nothing in a report can keep a cluster up.
    for report in write_reports(pulled, to):
        note(f"Report: {report}")


def _split(arguments: tuple[str, ...], local: bool) -> tuple[str | None, list[str]]:
    """Split `arguments` into the task, if one is given, and those for `sky launch`."""
    positional, options = list(arguments), list[str]()
    if any(argument.startswith("-") for argument in arguments):
        if local:
            return None, list(arguments)  # the provider names and refuses them
        from launcher.skypilot.door import split_arguments

        positional, options = split_arguments(arguments)
    if len(positional) > 1:
        raise click.UsageError(f"`{positional[1]}` is a second task: give only one")
    return positional[0] if positional else None, options


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


for _command in (init, tunnel, open_page, run, cancel, tasks, ls, logs, pull, cost, doctor):
    cli.add_command(_command)


def main() -> None:
    kit.cli.run(cli, "launcher")
