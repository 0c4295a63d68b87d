"""`trainer finetune`: the loop beside the agent."""

from pathlib import Path
from typing import Any

import click

import kit.cli
from trainer.cli.options import config_file, overrides


@click.command()
@config_file
@click.option(
    "--validation_dataset",
    "--validation-dataset",
    type=Path,
    metavar="FILE",
    help="Examples to evaluate on; they are never trained on.",
)
@click.option(
    "--validation_interval",
    "--validation-interval",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Validate every N epochs.",
)
@overrides
@click.option("--resume", is_flag=True, help="Continue the run in the output directory.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def finetune(config_file: Path, as_json: bool, **options: Any) -> None:
    """Train an agent's model as CONFIG describes: sample, score and train, epoch by epoch.

    \b
    Example:
      trainer finetune finetune.yaml
      trainer finetune finetune.yaml --validation_dataset=data/val.json --validation_interval=5
      trainer finetune --config_file=configs/finetune.yml -o finetuning.num_epochs 50
    """
    from trainer.harness.finetune import closing_lines, finetune, summary

    try:
        result = finetune(config_file, **options)
    except KeyboardInterrupt:
        kit.cli.note("Stopped; run the same command with `--resume` to continue")
        raise click.exceptions.Exit(130) from None
    if result is None:
        return
    for line in closing_lines(result):
        kit.cli.note(line)
    if as_json:
        kit.cli.data(summary(result))
