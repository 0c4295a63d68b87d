"""`trainer dry-run`: tries a config on one example before anything is rented."""

from pathlib import Path
from typing import Any

import click

import kit.cli
from kit.types import Json
from trainer.cli.options import as_json, config_file, overrides


@click.command("dry-run")
@config_file
@click.option("--gpu", metavar="CARD", help="Estimate for this card, such as H100.  [this server]")
@click.option(
    "--price",
    type=click.FloatRange(0),
    metavar="DOLLARS",
    help="What an hour of the card costs.  [SkyPilot's catalog]",
)
@overrides
@as_json
def dry_run(
    config_file: Path, gpu: str | None, price: float | None, overrides: Any, as_json: bool
) -> None:
    """Try CONFIG on one example, check everything, and estimate what the run will cost.

    Runs the first example `num_generations` times, with the server that CONFIG names, and trains
    nothing. Exits with 1 if a check fails.

    \b
    Example:
      trainer dry-run finetune.yaml
      trainer dry-run finetune.yaml --gpu H100
      trainer dry-run finetune.yaml --gpu H100 --price 2.99
    """
    from rich.console import Console

    from kit.gpus import find_card
    from trainer.harness.dry_run import dry_run
    from trainer.harness.prices import price_of

    if gpu and price is None:
        price, about_price = price_of(find_card(gpu).name)
        kit.cli.note(about_price)
    result = dry_run(config_file, overrides, gpu, price, Console(stderr=True))
    if as_json:
        kit.cli.data({"checks": [vars(one) for one in result.checks], "estimate": result.estimate})
    else:
        for check in result.checks:
            click.echo(f"{'ok  ' if check.ok else 'BAD '} {check.name}: {check.message}")
            if check.hint:
                click.echo(f"     hint: {check.hint}")
        for line in _lines(result.estimate):
            click.echo(line)
    if not result.ok:
        raise click.exceptions.Exit(1)
    kit.cli.note(f"Next: `trainer finetune {config_file}`")


def _lines(estimate: Json) -> list[str]:
    lines = [f"Longest conversation: {estimate['longest_conversation_tokens']:,} tokens"]
    for name, label in (("epoch", "An epoch"), ("run", f"All {estimate['epochs']} epochs")):
        total = estimate[name]
        cost = "" if total["dollars"] is None else f", ${total['dollars']:.2f}"
        lines.append(
            f"{label}: {total['sampled_tokens']:,} tokens sampled, "
            f"{total['prompt_tokens']:,} read, {total['minutes']:.1f} minutes{cost}"
        )
    lines.append(f"Minutes are for {estimate['where']}")
    return lines
