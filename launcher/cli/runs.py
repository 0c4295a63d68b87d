"""The commands of `launcher` that start and stop a run."""

import shlex
import sys
from pathlib import Path

import click

from kit.cli import data, note
from launcher.cli.reports import as_json, managed_runs
from launcher.cli.target import Target, on_cluster
from launcher.lease import describe_lease


# Everything after the first word belongs to the command, even `-c` and `--wait`.
@click.command(context_settings={"allow_interspersed_args": False})
@on_cluster
@click.option("--wait", is_flag=True, help="Show the output and exit with the command's code.")
@click.option("--managed", is_flag=True, help="Run on a new cluster, replaced if it is lost.")
@click.option("--task", metavar="TASK", help="Managed: the server.  [art]")
@click.option("--state-dir", metavar="DIR", help="Managed: checkpoints on a shared disk.")
@as_json
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    target: Target,
    wait: bool,
    managed: bool,
    task: str | None,
    state_dir: str | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND on a cluster and print the id of the run.

    COMMAND runs next to the server, in the synced workdir with its environment active.
    ART_BASE_URL and OPENAI_BASE_URL are the addresses of the server.

    With --managed, a new cluster runs the server and COMMAND. If the cluster is lost, SkyPilot
    starts another one, which continues from the last checkpoint; --wait then exits with 0 or 1.

    Options of the launcher go before COMMAND. A single word is run as a line of bash; several
    words are a program and its arguments.

    \b
    Example:
      launcher run python train.py --steps 100
      launcher run --wait 'nvidia-smi; df -h'
      launcher run --managed --task art python train.py
    """
    if wait and as_json:
        raise click.UsageError("with `--wait`, stdout is the command's output: remove `--json`")
    if managed:
        from launcher.packaged import find_task

        path = find_task(task or "sky/art.yaml")
        return _run_managed(target, path, state_dir, command, wait, as_json)
    if task or state_dir:
        raise click.UsageError("`--task` and `--state-dir` work only with `--managed`")
    cluster = target.cluster
    started = cluster.run(_line(command))
    if wait:
        cluster.logs(started.id, follow=True)
        sys.exit(cluster.wait(started))
    _print_id(started.id, started.name, as_json)
    note(f"Next: `launcher logs {started.id}{target.options}`")


@click.command()
@on_cluster
@managed_runs
@click.argument("run_id", metavar="RUN")
def cancel(target: Target, managed: bool, run_id: str) -> None:
    """Stop a run. `launcher down` stops the server.

    \b
    Example:
      launcher cancel 3
      launcher cancel --managed 2
    """
    if (target.managed() if managed else target.cluster).cancel(run_id):
        options = " --managed" if managed else target.options
        note(f"Run `{run_id}` is cancelled; see it with `launcher logs {run_id}{options}`")
    else:
        note(f"Run `{run_id}` was already over")


def _run_managed(
    target: Target,
    path: Path,
    state_dir: str | None,
    command: tuple[str, ...],
    wait: bool,
    as_json: bool,
) -> None:
    from launcher.task import Task

    managed, settings = target.managed(), target.cluster.settings
    task = Task.load(path, settings, env_file=target.env_file)
    ports = dict(zip(("port", "openai_port"), task.ports, strict=True))
    settings = settings.model_copy(update=ports)  # the task may override them
    run_id = managed.start(task, _line(command), settings, state_dir=state_dir)
    note(describe_lease(task.envs, None))
    _print_id(run_id, task.name, as_json)
    note(f"Next: `launcher logs --managed {run_id}`; `ls` and `cancel` accept `--managed` too")
    if wait:
        sys.exit(0 if managed.wait(run_id) else 1)


def _print_id(run_id: str, name: str, as_json: bool) -> None:
    if as_json:
        data({"id": run_id, "name": name})
    else:
        click.echo(run_id)


def _line(command: tuple[str, ...]) -> str:
    """The line of bash for a command. Several words are quoted, so they arrive unchanged."""
    return command[0] if len(command) == 1 else shlex.join(command)
