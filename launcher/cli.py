"""`launcher`: the program on the laptop. Commands parse, call and print; nothing else."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kit.cli
from kit.cli import data, note
from launcher.target import Target, on_cluster

if TYPE_CHECKING:
    from launcher.checkpoints import PulledCheckpoint

HOME = Path("checkpoints")
"""Where `pull` and `down` bring checkpoints when `--to` is not given."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kit.cli.version(), prog_name="launcher")
def cli() -> None:
    """Rent a cluster, train on it, bring the checkpoints home, tear it down.

    \b
    Example:
      launcher up sky/art-cpu.yaml
      launcher tunnel
      launcher pull
      launcher down
    """


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
save_to = click.option(
    "--to", type=Path, default=HOME, show_default=True, metavar="DIR", help="Where to save."
)


@cli.command(context_settings={"ignore_unknown_options": True})
@on_cluster
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", help="An env of the task.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TASK] [SKY ARGUMENT]...")
def up(target: Target, envs: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Bring a cluster up with TASK and wait until its server is healthy.

    TASK is `sky/art.yaml` when not given, with --local `sky/art-cpu.yaml`. Any other argument is
    one of `sky launch`. Safe to repeat.

    \b
    Example:
      launcher up
      launcher up sky/art-cpu.yaml -c rehearsal --infra slurm
      launcher up --local --env BASE_MODEL=tiny-random
    """
    from launcher.task import Task

    cluster = target.cluster
    path, rest = _split(arguments, target.local)
    task = Task.load(
        path, cluster.settings, env_file=target.env_file, envs=dict(map(_assignment, envs))
    )
    if not cluster.up(task, rest, progress=note):
        note("Nothing was launched")
        return
    where = target.options
    note(f"Cluster `{cluster.name}` is up and its server is healthy")
    if not target.local:
        note(f"Log in: `ssh {cluster.name}`; end it: `launcher down{where}`, `sky down` loses data")
    note(f"Next: `launcher tunnel{where}`, then train; `launcher pull{where}` brings it home")


@cli.command(context_settings={"ignore_unknown_options": True})
@on_cluster
@click.option("--wait", is_flag=True, help="Show its output and exit with its code.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(target: Target, wait: bool, command: tuple[str, ...]) -> None:
    """Start COMMAND on a cluster beside its server, and print the run's id.

    It runs in the synced workdir with its environment active, and finds the server in
    ART_BASE_URL and OPENAI_BASE_URL.

    \b
    Example:
      launcher run python train.py
      launcher run --wait 'nvidia-smi; df -h'
    """
    cluster = target.cluster
    started = cluster.run(" ".join(command))
    if wait:
        cluster.logs(started.id, follow=True)
        sys.exit(cluster.wait(started))
    click.echo(started.id)
    note(f"Next: `launcher logs {started.id}{target.options}`")


@cli.command()
@on_cluster
@click.option("--follow/--no-follow", default=True, show_default=True, help="Go on as it grows.")
@click.option("--tail", type=click.IntRange(0), default=0, metavar="N", help="The last N lines.")
@click.argument("run_id", required=False, metavar="[RUN]")
def logs(target: Target, follow: bool, tail: int, run_id: str | None) -> None:
    """Show the output of a run, by default the newest.

    \b
    Example:
      launcher logs
      launcher logs 1 --no-follow --tail 50
    """
    target.cluster.logs(run_id, follow=follow, tail=tail)


@cli.command()
@on_cluster
@save_to
@as_json
def pull(target: Target, to: Path, as_json: bool) -> None:
    """Bring the checkpoints home and check every file against its sha256.

    Only what is new is sent, and an interrupted pull goes on where it stopped.

    \b
    Example:
      launcher pull
      launcher pull --to ~/models --json
    """
    cluster = target.cluster
    pulled = cluster.pull(to)
    if as_json:
        data([vars(checkpoint) for checkpoint in pulled])
    _summarize(pulled, to)


@cli.command()
@on_cluster
@click.option("--port", type=click.IntRange(1, 65535), help="Local end of the control API.")
@click.option("--openai-port", type=click.IntRange(1, 65535), help="Local end of the OpenAI API.")
def tunnel(target: Target, port: int | None, openai_port: int | None) -> None:
    """Reach the server's two ports on this machine until you press Ctrl-C.

    Prints the variables that lead a client there, once the server answers.

    \b
    Example:
      launcher tunnel
      launcher tunnel --port 17999 --openai-port 18000
    """
    from launcher.cluster import wait_for_ever, wait_until_healthy

    cluster = target.cluster
    settings = cluster.settings
    with cluster.tunnel(port or settings.port, openai_port or settings.openai_port) as endpoints:
        wait_until_healthy(endpoints, cluster.name)
        for variable, value in endpoints.exports().items():
            click.echo(f"export {variable}={value}")
        sys.stdout.flush()
        note("The tunnel is open; Ctrl-C closes it")
        with contextlib.suppress(KeyboardInterrupt):
            wait_for_ever(endpoints, cluster.name)


@cli.command()
@on_cluster
@as_json
def ls(target: Target, as_json: bool) -> None:
    """List the clusters, or with -c the runs of one.

    \b
    Example:
      launcher ls
      launcher ls -c art --json
    """
    cluster = target.cluster
    rows: list[Any] = cluster.runs() if target.named else cluster.provider.clusters()
    if as_json:
        data([vars(row) for row in rows])
        return
    for row in rows:
        click.echo("\t".join(str(value) for value in vars(row).values()))
    if not rows:
        note("There is nothing to list; `launcher up` brings a cluster up")


@cli.command()
@on_cluster
@save_to
@click.option("--discard", is_flag=True, help="Do not bring the checkpoints home first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def down(target: Target, to: Path, discard: bool, yes: bool) -> None:
    """Bring the checkpoints home, verify them, and tear the cluster down.

    Safe to repeat, and on a cluster that is half made.

    \b
    Example:
      launcher down
      launcher down -c art --discard --yes
    """
    cluster = target.cluster
    loss = " and lose what was not pulled" if discard else ""
    if not yes:
        click.confirm(f"Tear down cluster `{cluster.name}`{loss}?", abort=True, err=True)
    pulled = cluster.down(None if discard else to)
    if pulled or not discard:
        _summarize(pulled, to)
    note(f"Cluster `{cluster.name}` is gone")


def _split(arguments: tuple[str, ...], local: bool) -> tuple[Path, list[str]]:
    """The task and what is left for `sky launch`."""
    positional, options = list(arguments), list[str]()
    if any(argument.startswith("-") for argument in arguments):
        if local:
            return Path("sky/art-cpu.yaml"), list(arguments)  # the provider refuses them by name
        from launcher.sky_provider import split_arguments

        positional, options = split_arguments(arguments)
    if len(positional) > 1:
        raise click.UsageError(f"`{positional[1]}` is one argument too many: give one task")
    default = "sky/art-cpu.yaml" if local else "sky/art.yaml"
    return Path(positional[0] if positional else default), options


def _assignment(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name.isidentifier() and separator):
        raise click.BadParameter(f"`{text}` is not NAME=VALUE", param_hint="--env")
    return name, value


def _summarize(pulled: "list[PulledCheckpoint]", to: Path) -> None:
    if not pulled:
        note("There were no checkpoints to bring home")
        return
    new = [checkpoint for checkpoint in pulled if checkpoint.new]
    size = sum(checkpoint.bytes for checkpoint in new) / 1e6
    note(
        f"{len(new)} new of {len(pulled)} checkpoints in `{to}` ({size:.1f} MB), every file "
        "matches its sha256"
    )


def main() -> None:
    kit.cli.run(cli, "launcher")
