"""What `./launch-cluster.sh --local` does: a backend on this machine, and the example trained.

A second call goes on where the first was stopped.
"""

from pathlib import Path

import click

import kit.cli
from examples.temporal_clue import quickstart
from launcher import Cluster, Task
from launcher.local_provider import LocalProvider
from launcher.settings import read
from trainer.smollm2 import NAME


@click.command()
def main() -> None:
    """Bring a backend up on this machine and train the Temporal Clue example on it."""
    settings = read()
    provider = LocalProvider()
    cluster = Cluster(settings.cluster, provider=provider, settings=settings)
    # The example is made for this model, whatever `.env` names for a rented GPU.
    task = Task.load(Path("sky/art-cpu.yaml"), settings, envs={"BASE_MODEL": NAME})
    cluster.up(task, progress=kit.cli.note)
    kit.cli.note(f"The backend is up; training `{NAME}` on puzzles, some minutes on two cores")
    state = provider.workdir(cluster.name) / ".art"
    ports = ("--port", str(settings.port), "--openai-port", str(settings.openai_port))
    quickstart.main([*ports, "--state-dir", str(state)], standalone_mode=False)
    kit.cli.note("  bring it home, end the backend: launcher down --local")


if __name__ == "__main__":
    kit.cli.run(main, "launch-cluster.sh")
