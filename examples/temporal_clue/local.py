"""`./launch-cluster.sh --local`: start a backend on this machine and train the example on it.

With a CUDA GPU and vLLM (the `cluster` extra), it serves an 8B model with vLLM. Otherwise it serves
SmolLM2 with the embedded engine. If training is stopped, the same command continues it.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

import kit.cli
from examples.temporal_clue import quickstart
from kit.settings import gather
from kit.state_dir import STATE_DIR
from launcher import Cluster, LocalProvider, Task
from launcher.settings import read
from trainer.base_model.smollm2 import NAME
from trainer.config import ServerConfig
from trainer.engines.choose import engine_kind

STOP = "  Stop the backend:   .venv/bin/launcher down --local  # saves the checkpoints first"


@dataclass(frozen=True)
class Plan:
    """The task that serves the model, and the size of the puzzles."""

    task: Path
    size: str
    envs: Mapping[str, str] = field(default_factory=dict)


def plan(config: ServerConfig) -> Plan:
    """Choose a plan for this machine by the engine that the server would choose."""
    if engine_kind(config) == "vllm":
        return Plan(Path("sky/art-local.yaml"), "small")
    # The tiny puzzles are made for this model, so a `BASE_MODEL` in `.env` does not apply.
    return Plan(Path("sky/art-cpu.yaml"), "tiny", {"BASE_MODEL": NAME})


@click.command()
@click.option("--epochs", default=24, show_default=True, help="Number of epochs to train.")
@click.option("--seed", default=0, show_default=True, help="Seed for the order of the puzzles.")
def main(epochs: int, seed: int) -> None:
    """Start a backend on this machine and train the Temporal Clue example on it."""
    settings = read()
    provider = LocalProvider()
    cluster = Cluster(settings.cluster, provider=provider, settings=settings)
    chosen_plan = plan(gather(ServerConfig))
    task = Task.load(chosen_plan.task, settings, envs=chosen_plan.envs)
    try:
        cluster.up(task, progress=kit.cli.note)
        model = task.envs["BASE_MODEL"]
        duration = " (a few minutes on two cores)" if chosen_plan.size == "tiny" else ""
        kit.cli.note(f"The backend is ready; training `{model}` on puzzles{duration}")
        state = provider.workdir(cluster.name) / STATE_DIR
        port, openai_port = map(str, cluster.ports)
        ports = ("--port", port, "--openai-port", openai_port)
        what = ("--state-dir", str(state), "--size", chosen_plan.size, "--base-model", model)
        length = ("--epochs", str(epochs), "--seed", str(seed))
        again = ("--again", "./launch-cluster.sh --local" + (f" --seed {seed}" if seed else ""))
        quickstart.main([*ports, *what, *length, *again], standalone_mode=False)
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter when training was stopped
        if isinstance(stop, KeyboardInterrupt):
            kit.cli.note(quickstart.STOPPED)
        kit.cli.note(f"The backend stops by itself when it is idle. To stop it now:\n{STOP}")
        sys.exit(130)
    kit.cli.note(STOP)


if __name__ == "__main__":
    kit.cli.run(main, "launch-cluster.sh")
