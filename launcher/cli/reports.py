"""The verbs of `launcher` that tell of a cluster, or bring home what it made."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kit.cli import data, note
from launcher.cli.target import Target, on_cluster

if TYPE_CHECKING:
    from launcher.checkpoints import PulledCheckpoint
    from launcher.provider import Cost, Progress

HOME = Path("checkpoints")
"""Where `pull` and `down` bring checkpoints when `--to` is not given."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
of_managed = click.option("--managed", is_flag=True, help="Managed runs, of no cluster here.")
save_to = click.option(
    "--to", type=Path, default=HOME, show_default=True, metavar="DIR", help="Where to save."
)


@click.command()
@on_cluster
@of_managed
@as_json
def ls(target: Target, managed: bool, as_json: bool) -> None:
    """List the clusters, with -c the runs of one, or with --managed the managed runs.

    \b
    Example:
      launcher ls
      launcher ls -c art --json
      launcher ls --managed
    """
    cluster = target.cluster
    rows: list[Any]
    if managed:
        rows = target.managed().runs()
    else:
        rows = cluster.runs() if target.named else cluster.provider.clusters()
    if as_json:
        data([vars(row) for row in rows])
        return
    for row in rows:
        click.echo("\t".join(str(value) for value in vars(row).values()))
    if not rows:
        note("There is nothing to list; `launcher up` brings a cluster up")


@click.command()
@on_cluster
@click.option("--follow/--no-follow", default=True, show_default=True, help="Go on as it grows.")
@click.option("--tail", type=click.IntRange(0), default=0, metavar="N", help="The last N lines.")
@click.option("--bundle", type=Path, metavar="FILE", help="Pack all logs into a .tar.gz instead.")
@of_managed
@as_json
@click.argument("run_id", required=False, metavar="[RUN|server|engine|vllm|learner]")
def logs(
    target: Target,
    follow: bool,
    tail: int,
    bundle: Path | None,
    managed: bool,
    as_json: bool,
    run_id: str | None,
) -> None:
    """Show the output of a run, by default the newest, or of a part of the server.

    A bundle for a bug report holds every log, the metrics, and the pictures of packed rows where
    `plot_tensors` made some; the values of your secrets are blacked out.

    \b
    Example:
      launcher logs
      launcher logs 1 --no-follow --tail 50
      launcher logs learner
      launcher logs --managed 2
      launcher logs --bundle report.tar.gz
    """
    if bundle is None and as_json:
        raise click.UsageError("a log is text: `--json` is for `--bundle`")
    if bundle is not None and run_id is not None:
        raise click.UsageError(f"`--bundle` packs every log: leave out `{run_id}`")
    if managed:
        if bundle is not None:
            raise click.UsageError("`--bundle` is of a cluster, and cannot be `--managed`")
        with contextlib.suppress(KeyboardInterrupt):
            target.managed().logs(run_id, follow=follow, tail=tail)
        return
    if bundle is not None:
        names = target.cluster.bundle(bundle, env_file=target.env_file)
        if as_json:
            data({"bundle": str(bundle), "files": names})
        for name in [] if as_json else names:
            note(name)
        note(f"Packed into `{bundle}`; look through it before you send it")
        return
    with contextlib.suppress(KeyboardInterrupt):
        target.cluster.logs(run_id, follow=follow, tail=tail)


@click.command()
@on_cluster
@save_to
@click.option("--watch", is_flag=True, help="Go on until the newest run is over.")
@click.option("--every", type=float, default=15.0, show_default=True, help="Seconds between two.")
@as_json
def pull(target: Target, to: Path, watch: bool, every: float, as_json: bool) -> None:
    """Bring checkpoints and metrics home and check every checkpoint's files against their sha256.

    Only what is new is sent, and an interrupted pull goes on where it stopped.

    \b
    Example:
      launcher pull
      launcher pull --watch
      launcher pull --to ~/models --json
    """
    cluster = target.cluster
    with progress_bar() as progress:
        pulled = cluster.pull(to, progress=progress)
    if watch:
        summarize(pulled, to)
        for pulled in cluster.watch(to, every=every):
            summarize(pulled, to)
    if as_json:
        data([vars(checkpoint) for checkpoint in pulled])
    if not watch:
        summarize(pulled, to)


@click.command()
@on_cluster
@as_json
def cost(target: Target, as_json: bool) -> None:
    """Say what a cluster cost so far, costs an hour, and will have cost at the end of its lease.

    \b
    Example:
      launcher cost
      launcher cost --json
    """
    spent = target.cluster.cost()
    if as_json:
        data({**vars(spent), "projected": spent.projected(time.time())})
        return
    click.echo(dollars(spent))


@click.command()
@on_cluster
@as_json
def doctor(target: Target, as_json: bool) -> None:
    """Look at all that a launch needs, and say what to do where something is wrong.

    \b
    Example:
      launcher doctor
      launcher doctor --json
    """
    from launcher.doctor import examine

    checks = examine(target.cluster, target.env_file)
    if as_json:
        data([vars(check) for check in checks])
    for check in [] if as_json else checks:
        click.echo(f"{'ok  ' if check.ok else 'BAD '} {check.name}: {check.told}")
        if check.fix and not check.ok:
            click.echo(f"     {check.fix}")
    if wrong := [check.name for check in checks if not check.ok]:
        note(f"Wrong: {', '.join(wrong)}")
        sys.exit(1)
    note("All is well")


@contextlib.contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda arrived, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(arrived: int, share: float) -> None:
            bar.update(task, completed=arrived, total=round(arrived / share) if share else None)

        yield tell


def summarize(pulled: "list[PulledCheckpoint]", to: Path) -> None:
    from launcher.checkpoints import metrics

    if not pulled:
        note("There were no checkpoints to bring home")
        return
    new = [checkpoint for checkpoint in pulled if checkpoint.new]
    size = megabytes(sum(checkpoint.bytes for checkpoint in new))
    note(
        f"{len(new)} new of {len(pulled)} checkpoints in `{to}` ({size}), every file "
        "matches its sha256"
    )
    if found := metrics(to):
        note(f"Metrics: {', '.join(str(path) for path in found)}")


def dollars(spent: "Cost") -> str:
    told = f"it cost ${spent.so_far:.2f} in {spent.hours:.1f} hours, ${spent.per_hour:.2f} an hour"
    projected = spent.projected(time.time())
    return told if projected is None else f"{told}; ${projected:.2f} when its lease is over"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
