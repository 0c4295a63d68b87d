"""The quickstart: train the Temporal Clue agent on a running backend.

    python -m examples.temporal_clue.quickstart [--port 7999] [--openai-port 8000]

Ctrl-C stops it cleanly. The same command continues from there.
"""

import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

import kit.cli
from kit.state_dir import checkpoint_path, model_path
from trainer.errors import BackendBehind
from trainer.harness.components import ArtTrainerAdapterConfig
from trainer.harness.finetune import Result, finetune

HERE = Path(__file__).parent
STOPPED = "Stopped; run the same command again to continue"
QUESTION = {
    "role": "user",
    "content": "Rose did it with the rope in the hall at noon. Who, weapon, room, time?",
}
LESSON = "A model this small learns the format and to find answers in the clues, not deduction"
# For each size of puzzles: the config, and the puzzles for validation.
SIZES = {
    "tiny": ("config.yaml", "validation.jsonl"),
    "small": ("gpu.yaml", "small_validation.jsonl"),
}


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the backend.")
@click.option("--port", default=7999, show_default=True, help="Control port of the backend.")
@click.option("--openai-port", default=8000, show_default=True, help="OpenAI port of the backend.")
@click.option(
    "--state-dir",
    default=".art",
    show_default=True,
    help="Directory with the backend's checkpoints.",
)
@click.option(
    "--output-dir",
    default=".art/temporal-clue",
    show_default=True,
    help="Directory for metrics and the plot.",
)
@click.option("--epochs", default=24, show_default=True, help="Number of epochs to train.")
@click.option(
    "--size",
    type=click.Choice(list(SIZES)),
    default="tiny",
    show_default=True,
    help="Size of the puzzles. `small` needs a model with billions of parameters.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for the order of the puzzles.")
@click.option("--base-model", help="Base model to train instead of the config's.")
@click.option("--again", hidden=True, help="Command to suggest for training longer.")
@click.pass_context
def main(
    context: click.Context,
    host: str,
    port: int,
    openai_port: int,
    state_dir: str,
    output_dir: str,
    epochs: int,
    size: str,
    seed: int,
    base_model: str | None,
    again: str | None,
) -> None:
    """Train the Temporal Clue example and compare the model before and after."""
    overrides = {
        "llms.policy.base_url": f"http://{host}:{openai_port}/v1",
        "trainer_adapters.backend.backend.ip": host,
        "trainer_adapters.backend.backend.port": str(port),
        "trainer_adapters.backend.training.max_steps": str(epochs + 1),
        "finetuning.num_epochs": str(epochs),
        "finetuning.seed": str(seed),
        "finetuning.output_dir": output_dir,
        "eval.general.output_dir": f"{output_dir}/runs",
    }
    if base_model:
        overrides["trainer_adapters.backend.backend.base_model"] = base_model
    config, puzzles = SIZES[size]
    validation = HERE / "data" / puzzles
    started = time.monotonic()
    train = partial(
        finetune,
        HERE / config,
        overrides=list(overrides.items()),
        validation_dataset=validation,
        # A validation takes about as long as an epoch, so a short run has none in its middle.
        validation_interval=epochs // 2 if epochs >= 12 else max(1, epochs),
    )
    try:
        try:
            result = train(resume=True)
        except BackendBehind:
            kit.cli.note("The backend does not have the previous run; starting a new one")
            result = train(resume=False)
    except KeyboardInterrupt:
        kit.cli.note(STOPPED)
        sys.exit(130)
    assert result is not None
    if not result.statuses:
        kit.cli.note(f"All {epochs} epochs are finished; train longer with a larger `--epochs`")
    seconds = time.monotonic() - started
    longer = f"{again or _command(context)} --epochs {2 * epochs}"
    for line in report(result, Path(state_dir), Path(output_dir), validation, seconds, longer):
        kit.cli.note(line)


def _command(context: click.Context) -> str:
    """Return this command as the user would type it, without `--epochs`."""
    given = {
        name: str(value)
        for name, value in context.params.items()
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE and name != "epochs"
    }
    options = (
        part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)
    )
    return shlex.join(["python", "-m", "examples.temporal_clue.quickstart", *options])


def report(
    result: Result, state: Path, output: Path, validation: Path, seconds: float, longer: str
) -> list[str]:
    """Return the closing lines: results before and after, the files, and what to try next."""
    history = result.history
    assert history is not None
    first, last = history.validation[0], history.validation[-1]
    adapter = result.config.trainer_adapters["backend"]
    assert isinstance(adapter, ArtTrainerAdapterConfig)
    backend = adapter.backend
    step = history.metrics[-1]["step"]
    steps = "1 step" if history.epoch == 1 else f"{history.epoch} steps"
    checkpoint = checkpoint_path(model_path(Path(state), backend.project, backend.name), step)
    url = result.config.llms["policy"].base_url
    # Without a limit, a small model may repeat itself to the end of its context.
    request = {"model": backend.name, "messages": [QUESTION], "temperature": 0, "max_tokens": 64}
    return [
        "",
        f"Trained {steps}; this command took {seconds:.0f} s",
        "",
        f"Reward on {last['num_examples']} unseen puzzles: "
        f"{first['avg_reward']:.3f} before, {last['avg_reward']:.3f} after "
        f"({last['avg_reward'] - first['avg_reward']:+.3f})",
        f"Accuracy of valid answers: {_format(accuracy(output, first['epoch']))} before, "
        f"{_format(accuracy(output, last['epoch']))} after "
        f"({guessing_accuracy(validation):.2f} by guessing)",
        *([LESSON] if validation.name == SIZES["tiny"][1] else []),
        "",
        f"Checkpoint: {checkpoint}",
        f"Plot:       {output}/reward_plot.png",
        f"Metrics:    {output}/training_metrics.jsonl",
        "",
        "Next:",
        f"  Ask the model:      curl -s {url}/chat/completions "
        f"-H 'content-type: application/json' -d '{json.dumps(request)}'",
        f"  Train longer:       {longer}",
        "  Use your own agent: docs/your-agent.md",
    ]


def guessing_accuracy(validation: Path) -> float:
    """Return the accuracy of guessing among the options."""
    puzzles = [json.loads(line)["options"] for line in validation.read_text().splitlines()]
    shares = [1 / len(options) for puzzle in puzzles for options in puzzle.values()]
    return sum(shares) / len(shares)


def accuracy(output: Path, epoch: int) -> float | None:
    """Return the share of correct lines among the valid ones, or None if no line was valid."""
    path = output / "runs" / f"validation_{epoch:04d}.jsonl"
    rows = [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
    valid = sum(row.get("valid_lines", 0) for row in rows)
    return sum(row.get("correct_lines", 0) for row in rows) / valid if valid else None


def _format(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.2f}"


if __name__ == "__main__":
    kit.cli.run(main, "quickstart")
