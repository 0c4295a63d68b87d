"""The commands of `trainer` that read what a server has trained."""

from pathlib import Path

import click

import kit.cli
from trainer.cli.options import as_json, state_dir


@click.command()
@state_dir
@as_json
def models(state_dir: Path, as_json: bool) -> None:
    """List the models that were trained here, with their steps and rewards.

    \b
    Example:
      trainer models
      trainer models --state-dir ~/sky_workdir/.art --json
    """
    from trainer.runs import list_runs

    rows = [run.summary() for run in list_runs(state_dir)]
    if as_json:
        return kit.cli.data(rows)
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        name = f"{row['project']}/{row['name']}"
        note = f"\t{row['damaged_lines']} damaged lines" if "damaged_lines" in row else ""
        click.echo(f"{name}\tstep {row['step']}\treward {reward}\t{row['base_model']}{note}")
    if not rows:
        kit.cli.note(f"There is no model in `{state_dir}` yet")


@click.command()
@click.argument("run", required=False)
@state_dir
@as_json
def doctor(run: str | None, state_dir: Path, as_json: bool) -> None:
    """Report why RUN does not learn, likeliest cause first; exit 1 if there is a cause.

    \b
    Example:
      trainer doctor
      trainer doctor my_project/my_run --json
    """
    from trainer.doctor import examine
    from trainer.runs import find_run

    examined = find_run(state_dir, run)
    findings = examine(examined)
    if as_json:
        kit.cli.data([vars(finding) for finding in findings])
    for finding in [] if as_json else findings:
        click.echo(f"{finding.problem}\n  hint: {finding.hint}")
    if findings:
        raise SystemExit(1)
    kit.cli.note(f"Found no problem with `{examined.project}/{examined.name}`")
