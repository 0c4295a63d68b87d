"""The verbs of `launcher` that start a run and end one."""

import shlex
import sys
from pathlib import Path

import click

from kit.cli import data, note
from launcher.cli.reports import as_json, of_managed
from launcher.cli.target import Target, on_cluster
from launcher.lease import describe_lease


# Whatever follows the first word is the command's own, `-c` and `--wait` too.
@click.command(context_settings={"allow_interspersed_args": False})
@on_cluster
@click.option("--wait", is_flag=True, help="Show its output and exit with its code.")
@click.option("--managed", is_flag=True, help="On a cluster of its own, replaced when it is lost.")
@click.option("--task", type=Path, metavar="TASK", help="Managed: its server.  [sky/art.yaml]")
@click.option("--state-dir", metavar="DIR", help="Managed: shared disk for checkpoints.")
@as_json
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    target: Target,
    wait: bool,
    managed: bool,
    task: Path | None,
    state_dir: str | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND on a cluster beside its server, and print the run's id.

    It runs in the synced workdir with its environment active, and finds the server in
    ART_BASE_URL and OPENAI_BASE_URL. With --managed both get a cluster of their own; when that one
    is lost SkyPilot brings up another, where they go on from the last checkpoint; --wait then
    exits with 0 or 1.

    Options of the launcher come before COMMAND, what follows it is its own. One word is a line of
    bash; several are a program and its arguments.

    \b
    Example:
      launcher run python train.py --steps 100
      launcher run --wait 'nvidia-smi; df -h'
      launcher run --managed --task sky/art.yaml python train.py
    """
    if wait and as_json:
        raise click.UsageError("with `--wait` stdout is the command's: leave out `--json`")
    if managed:
        path = task or Path("sky/art.yaml")
        return _run_managed(target, path, state_dir, command, wait, as_json)
    if task or state_dir:
        raise click.UsageError("`--task` and `--state-dir` are for `--managed`")
    cluster = target.cluster
    started = cluster.run(_line(command))
    if wait:
        cluster.logs(started.id, follow=True)
        sys.exit(cluster.wait(started))
    _tell(started.id, started.name, as_json)
    note(f"Next: `launcher logs {started.id}{target.options}`")


@click.command()
@on_cluster
@of_managed
@click.argument("run_id", metavar="RUN")
def cancel(target: Target, managed: bool, run_id: str) -> None:
    """End a run; the server itself ends with `launcher down`.

    \b
    Example:
      launcher cancel 3
      launcher cancel --managed 2
    """
    if (target.managed() if managed else target.cluster).cancel(run_id):
        options = " --managed" if managed else target.options
        note(f"Run `{run_id}` is cancelled; see it with `launcher logs {run_id}{options}`")
    else:
        note(f"Run `{run_id}` was over already")


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
    settings = settings.model_copy(update=ports)  # the task may have its own
    run_id = managed.start(task, _line(command), settings, state_dir=state_dir)
    note(describe_lease(task.envs, None))
    _tell(run_id, task.name, as_json)
    note(f"Next: `launcher logs --managed {run_id}`; `ls` and `cancel` take `--managed` too")
    if wait:
        sys.exit(0 if managed.wait(run_id) else 1)


def _tell(run_id: str, name: str, as_json: bool) -> None:
    if as_json:
        data({"id": run_id, "name": name})
    else:
        click.echo(run_id)


def _line(command: tuple[str, ...]) -> str:
    """The bash of a command; several words reach the program as they were given here."""
    return command[0] if len(command) == 1 else shlex.join(command)
