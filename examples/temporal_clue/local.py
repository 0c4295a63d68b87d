"""What `./launch-cluster.sh --local` does: a backend on this machine, and the example trained.

With a CUDA card and vLLM (the `cluster` extra) that is vLLM and a model of 8B, else the embedded
engine and SmolLM2. A second call goes on where the first was stopped.
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

END = "  bring it home, end the backend: .venv/bin/launcher down --local"


@dataclass(frozen=True)
class Plan:
    """What is served, and which puzzles it is trained on."""

    task: Path
    size: str
    envs: Mapping[str, str] = field(default_factory=dict)


def plan(config: ServerConfig) -> Plan:
    """What this machine is fit for; the server's own choice of an engine decides."""
    if engine_kind(config) == "vllm":
        return Plan(Path("sky/art-local.yaml"), "small")
    # The small example is made for this model, whatever `.env` names for a GPU.
    return Plan(Path("sky/art-cpu.yaml"), "tiny", {"BASE_MODEL": NAME})


@click.command()
@click.option("--epochs", default=24, show_default=True, help="Rounds of sampling and training.")
@click.option("--seed", default=0, show_default=True, help="Order of the puzzles.")
def main(epochs: int, seed: int) -> None:
    """Bring a backend up on this machine and train the Temporal Clue example on it."""
    settings = read()
    provider = LocalProvider()
    cluster = Cluster(settings.cluster, provider=provider, settings=settings)
    wanted = plan(gather(ServerConfig))
    task = Task.load(wanted.task, settings, envs=wanted.envs)
    try:
        cluster.up(task, progress=kit.cli.note)
        model = task.envs["BASE_MODEL"]
        patience = ", some minutes on two cores" if wanted.size == "tiny" else ""
        kit.cli.note(f"The backend is up; training `{model}` on puzzles{patience}")
        state = provider.workdir(cluster.name) / STATE_DIR
        port, openai_port = map(str, cluster.ports)
        ports = ("--port", port, "--openai-port", openai_port)
        asked = ("--state-dir", str(state), "--size", wanted.size, "--base-model", model)
        length = ("--epochs", str(epochs), "--seed", str(seed))
        again = ("--again", "./launch-cluster.sh --local" + (f" --seed {seed}" if seed else ""))
        quickstart.main([*ports, *asked, *length, *again], standalone_mode=False)
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter when training was stopped
        if isinstance(stop, KeyboardInterrupt):
            kit.cli.note("Stopped; the same command goes on from here")
        kit.cli.note(f"The backend ends by itself when nobody uses it, or now:\n{END}")
        sys.exit(130)
    kit.cli.note(END)


if __name__ == "__main__":
    kit.cli.run(main, "launch-cluster.sh")
