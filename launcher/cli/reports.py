"""The commands of `launcher` that report on a cluster or pull its checkpoints."""

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

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
managed_runs = click.option("--managed", is_flag=True, help="Use managed runs, not a cluster's.")
save_to = click.option(
    "--to",
    type=Path,
    default=Path("checkpoints"),
    show_default=True,
    metavar="DIR",
    help="Directory for checkpoints and metrics.",
)


@click.command()
@on_cluster
@managed_runs
@as_json
def ls(target: Target, managed: bool, as_json: bool) -> None:
    """List clusters or runs.

    Lists all clusters, with -c the runs of one cluster, or with --managed the managed runs.

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
        note("Nothing to list; `launcher up` brings a cluster up")


@click.command()
@on_cluster
@click.option("--follow/--no-follow", default=True, show_default=True, help="Show new lines too.")
@click.option(
    "--tail", type=click.IntRange(0), default=0, metavar="N", help="Show the last N lines."
)
@click.option("--bundle", type=Path, metavar="FILE", help="Pack all logs into a .tar.gz instead.")
@managed_runs
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
    """Show the output of a run or of a process of the server.

    Shows the newest run by default. --bundle packs every log, the metrics, and the plots that
    `plot_tensors` made of packed rows into an archive for a bug report, without the values of your
    secrets.

    \b
    Example:
      launcher logs
      launcher logs 1 --no-follow --tail 50
      launcher logs learner
      launcher logs --managed 2
      launcher logs --bundle report.tar.gz
    """
    if bundle is None and as_json:
        raise click.UsageError("`--json` works only with `--bundle`, because a log is text")
    if bundle is not None and run_id is not None:
        raise click.UsageError(f"`--bundle` packs every log: remove `{run_id}`")
    if managed:
        if bundle is not None:
            raise click.UsageError("`--bundle` packs the logs of a cluster: remove `--managed`")
        with contextlib.suppress(KeyboardInterrupt):
            target.managed().logs(run_id, follow=follow, tail=tail)
        return
    if bundle is not None:
        names = target.cluster.bundle(bundle, env_file=target.env_file)
        if as_json:
            data({"bundle": str(bundle), "files": names})
        for name in [] if as_json else names:
            note(name)
        note(f"Packed into `{bundle}`; check its contents before you send it")
        return
    with contextlib.suppress(KeyboardInterrupt):
        target.cluster.logs(run_id, follow=follow, tail=tail)


@click.command()
@on_cluster
@save_to
@click.option("--watch", is_flag=True, help="Repeat until the newest run is over.")
@click.option(
    "--every",
    type=float,
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between pulls with --watch.",
)
@as_json
def pull(target: Target, to: Path, watch: bool, every: float, as_json: bool) -> None:
    """Copy new checkpoints and metrics to this machine.

    Checks each file of a checkpoint against its sha256. An interrupted pull continues where it
    stopped.

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
        for pulled in cluster.watch(to, interval=every):
            summarize(pulled, to)
    if as_json:
        data([vars(checkpoint) for checkpoint in pulled])
    if not watch:
        summarize(pulled, to)


@click.command()
@on_cluster
@as_json
def cost(target: Target, as_json: bool) -> None:
    """Show what a cluster costs.

    Shows the cost so far, per hour, and by the end of its lease. Workers count too; those that were
    removed do not.

    \b
    Example:
      launcher cost
      launcher cost --json
    """
    from launcher.provider import Cost

    costs = target.cluster.costs()
    spent = Cost.total(costs.values())
    workers = list(costs)[1:]
    if as_json:
        each = [{"name": name, **vars(costs[name])} for name in workers]
        data({**vars(spent), "projected": spent.projected(time.time()), "workers": each})
        return
    click.echo(dollars(spent))
    for name in costs if workers else ():
        click.echo(f"{name}\t${costs[name].so_far:.2f}\t${costs[name].per_hour:.2f} an hour")


@click.command()
@on_cluster
@click.option("--prices", is_flag=True, help="List what cards cost, by SkyPilot's catalogs.")
@as_json
@click.argument("model", required=False)
def doctor(target: Target, as_json: bool, prices: bool, model: str | None) -> None:
    """Check everything that a launch needs, or which cards hold MODEL.

    Suggests a fix for each problem, and exits with 1 if there is one. With MODEL, a directory or a
    hub id, lists the cards that can sample and train it, with their prices and the cheapest first,
    and exits with 1 if there is none.

    \b
    Example:
      launcher doctor
      launcher doctor Qwen/Qwen2.5-7B-Instruct
    """
    from launcher.cli.machines import show_cards, show_prices
    from launcher.doctor import examine

    if prices and model:
        raise click.UsageError("`--prices` lists all cards: remove it, or MODEL")
    if prices:
        return show_prices(target, as_json)
    if model is not None:
        return show_cards(target, model, as_json)
    checks = examine(target.cluster, target.env_file)
    if as_json:
        keys = {"message": "told"}  # the name that scripts rely on
        data([{keys.get(key, key): value for key, value in vars(it).items()} for it in checks])
    for check in [] if as_json else checks:
        click.echo(f"{'ok  ' if check.ok else 'BAD '} {check.name}: {check.message}")
        if check.fix and not check.ok:
            click.echo(f"     {check.fix}")
    if failed := [check.name for check in checks if not check.ok]:
        note(f"Failed checks: {', '.join(failed)}")
        sys.exit(1)
    note("All checks passed")


@contextlib.contextmanager
def progress_bar() -> "Iterator[Progress]":
    """Show a progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda received, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(received: int, share: float) -> None:
            bar.update(task, completed=received, total=round(received / share) if share else None)

        yield update


def summarize(pulled: "list[PulledCheckpoint]", to: Path) -> None:
    from launcher.checkpoints import metrics

    if not pulled:
        note("There are no checkpoints to pull")
        return
    new = [checkpoint for checkpoint in pulled if checkpoint.new]
    size = megabytes(sum(checkpoint.bytes for checkpoint in new))
    note(
        f"{len(new)} new of {len(pulled)} checkpoints in `{to}` ({size}); every file matches its "
        "sha256"
    )
    if found := metrics(to):
        note(f"Metrics: {', '.join(str(path) for path in found)}")


def dollars(spent: "Cost") -> str:
    text = f"it cost ${spent.so_far:.2f} in {spent.hours:.1f} hours, ${spent.per_hour:.2f} an hour"
    projected = spent.projected(time.time())
    return text if projected is None else f"{text}; ${projected:.2f} by the end of its lease"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
