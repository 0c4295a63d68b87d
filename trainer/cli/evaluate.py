"""`trainer eval`: compares models on a config's examples."""

from pathlib import Path
from typing import Any

import click

import kit.cli
from trainer.cli.options import as_json, config_file, overrides, state_dir


@click.command("eval")
@config_file
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    help="NAME@STEP, BASE@base, an LLM of the config, or URL#MODEL; may be repeated. The "
    "others are compared with the first.  [base model and newest step]",
)
@click.option(
    "--validation_dataset",
    "--validation-dataset",
    type=Path,
    metavar="FILE",
    help="Evaluate on these examples instead of the config's.",
)
@click.option(
    "--split",
    type=click.Choice(["train", "eval"]),
    help="Which examples of an environment.  [eval if it has any]",
)
@click.option(
    "--examples", "num_examples", type=click.IntRange(1), metavar="N", help="Use the first N only."
)
@click.option(
    "--num_generations",
    "--num-generations",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Runs of each example.",
)
@click.option(
    "--pass-at",
    type=click.IntRange(1),
    multiple=True,
    metavar="K",
    help="Estimate pass@K too; may be repeated.",
)
@click.option(
    "--success",
    type=float,
    metavar="REWARD",
    help="For pass@K: a run passes with this reward or more.  [rewards must be 0 or 1]",
)
@click.option("--name", metavar="NAME", help="Name of the results.  [that of the dataset]")
@click.option("--fresh", is_flag=True, help="Run again what has results already.")
@overrides
@state_dir
@as_json
def evaluate(config_file: Path, as_json: bool, **options: Any) -> None:
    """Run the examples of CONFIG with several models, and compare their rewards.

    Results are kept as evals/NAME.jsonl in the run's directory below --state-dir, or else in the
    output directory. The same command continues an interrupted evaluation. The key of a URL is
    read from EVAL_API_KEY or OPENAI_API_KEY.

    \b
    Example:
      trainer eval finetune.yaml
      trainer eval finetune.yaml -m my-agent@12 -m my-agent@24 \\
          --num_generations 8 --pass-at 1 --pass-at 8
      trainer eval finetune.yaml -m Qwen/Qwen2.5-1.5B-Instruct@base \\
          -m https://api.openai.com/v1#gpt-4.1-mini --validation_dataset data/val.json
    """
    from rich.console import Console

    from trainer.harness.evaluation.evaluate import EvalOptions, evaluate
    from trainer.harness.evaluation.table import show

    try:
        evaluation = evaluate(config_file, EvalOptions(**options), Console(stderr=True))
    except KeyboardInterrupt:
        kit.cli.note("Stopped; run the same command to continue")
        raise click.exceptions.Exit(130) from None
    summary = evaluation.summary()
    if as_json:
        kit.cli.data(summary)
    else:
        show(summary, Console())
    kit.cli.note(f"Results: {evaluation.path}")
    unscored = [label for label, one in evaluation.measured.items() if one.mean is None]
    if unscored:
        kit.cli.note(f"No run of `{unscored[0]}` has a reward: see the errors in the results")
        raise click.exceptions.Exit(1)
