"""The first five minutes: train the Temporal Clue agent on a backend that is up.

    python -m examples.temporal_clue.quickstart [--port 7999] [--openai-port 8000]

Ctrl-C stops it cleanly; the same command goes on from there.
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
ASK = {
    "role": "user",
    "content": "Rose did it with the rope in the hall at noon. Who, weapon, room, time?",
}
SMALL_MODEL = "What it learned is the form of an answer and finding it in the clues, not deduction"
# What is trained by the size of the puzzles: the config, and the puzzles that measure it.
SIZES = {
    "tiny": ("config.yaml", "validation.jsonl"),
    "small": ("gpu.yaml", "small_validation.jsonl"),
}


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the backend is.")
@click.option("--port", default=7999, show_default=True, help="Its control port.")
@click.option("--openai-port", default=8000, show_default=True, help="Its OpenAI port.")
@click.option("--state-dir", default=".art", show_default=True, help="Where its checkpoints lie.")
@click.option(
    "--output-dir",
    default=".art/temporal-clue",
    show_default=True,
    help="Where metrics and the plot go.",
)
@click.option("--epochs", default=24, show_default=True, help="Rounds of sampling and training.")
@click.option(
    "--size",
    type=click.Choice(list(SIZES)),
    default="tiny",
    show_default=True,
    help="Of the puzzles; `small` is for a model of billions of parameters.",
)
@click.option("--seed", default=0, show_default=True, help="Order of the puzzles.")
@click.option("--base-model", help="Train another model than the config's.")
@click.option("--again", hidden=True, help="The command that is told to train longer with.")
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
    """Train the Temporal Clue example and compare before with after."""
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
    config, measured = SIZES[size]
    validation = HERE / "data" / measured
    started = time.monotonic()
    train = partial(
        finetune,
        HERE / config,
        overrides=list(overrides.items()),
        validation_dataset=validation,
        validation_interval=max(1, epochs // 2),
    )
    try:
        try:
            result = train(resume=True)
        except BackendBehind:
            kit.cli.note("The backend has nothing of the run before: beginning anew")
            result = train(resume=False)
    except KeyboardInterrupt:
        kit.cli.note("Stopped; the same command goes on from here")
        sys.exit(130)
    assert result is not None
    if not result.statuses:
        kit.cli.note(f"This run had its {epochs} epochs: give it more with `--epochs`")
    seconds = time.monotonic() - started
    longer = f"{again or _command(context)} --epochs {2 * epochs}"
    for line in report(result, Path(state_dir), Path(output_dir), validation, seconds, longer):
        kit.cli.note(line)


def _command(context: click.Context) -> str:
    """This call without its length, as one types it."""
    given = {
        name: str(value)
        for name, value in context.params.items()
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE and name != "epochs"
    }
    options = (it for name, value in given.items() for it in (f"--{name.replace('_', '-')}", value))
    return shlex.join(["python", "-m", "examples.temporal_clue.quickstart", *options])


def report(
    result: Result, state: Path, output: Path, validation: Path, seconds: float, longer: str
) -> list[str]:
    """Before and after, where things lie, and what to try next."""
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
    # A bound: without one, what a small model repeats goes on to the end of its context.
    ask = {"model": backend.name, "messages": [ASK], "temperature": 0, "max_tokens": 64}
    return [
        "",
        f"Trained {steps}; this call took {seconds:.0f} s",
        f"Validation reward on {last['num_examples']} puzzles it never trained on: "
        f"{first['avg_reward']:.3f} before, {last['avg_reward']:.3f} after "
        f"({last['avg_reward'] - first['avg_reward']:+.3f})",
        f"Right among well-formed answers: {told(accuracy(output, first['epoch']))} before, "
        f"{told(accuracy(output, last['epoch']))} after, {chance(validation):.2f} by chance",
        *([SMALL_MODEL] if validation.name == SIZES["tiny"][1] else []),
        "",
        f"Checkpoint: {checkpoint}",
        f"Plot:       {output}/reward_plot.png",
        f"Metrics:    {output}/training_metrics.jsonl",
        "",
        "Next:",
        f"  ask it:       curl -s {url}/chat/completions -H 'content-type: application/json' "
        f"-d '{json.dumps(ask)}'",
        f"  train longer: {longer}",
        "  your agent:   docs/your-agent.md",
    ]


def chance(validation: Path) -> float:
    """The share of right answers of one who guesses among the options."""
    puzzles = [json.loads(line)["options"] for line in validation.read_text().splitlines()]
    shares = [1 / len(options) for puzzle in puzzles for options in puzzle.values()]
    return sum(shares) / len(shares)


def accuracy(output: Path, epoch: int) -> float | None:
    """Correct among valid lines of one validation; None when no line was valid."""
    path = output / "runs" / f"validation_{epoch:04d}.jsonl"
    rows = [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
    valid = sum(row.get("valid_lines", 0) for row in rows)
    return sum(row.get("correct_lines", 0) for row in rows) / valid if valid else None


def told(share: float | None) -> str:
    return "none were" if share is None else f"{share:.2f}"


if __name__ == "__main__":
    kit.cli.run(main, "quickstart")
