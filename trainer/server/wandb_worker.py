"""The process that holds wandb: `python -m trainer.server.wandb_worker`, see `reports`."""

import os
import signal
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.processes.worker import serve


class Runs:
    """A run of W&B for each model, begun with its first row and resumed by a later server."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], Any] = {}

    def log(self, key: str, directory: str, project: str, name: str, numbers: Json) -> str:
        """Add a row and return where the run is: its URL, or offline its directory."""
        run = self._runs.get((project, name))
        if run is None:
            run = self._runs[project, name] = _begin(key, directory, project, name)
        # W&B counts its own steps: a validation may come late, or twice for one step of ours.
        run.log(numbers)
        return str(run.url or Path(run.dir).parent)

    def finish(self) -> None:
        for run in self._runs.values():
            run.finish()
        self._runs.clear()


def _begin(key: str, directory: str, project: str, name: str) -> Any:
    import wandb

    os.environ["WANDB_API_KEY"] = key  # it may come from `.env`, which wandb does not read
    run = wandb.init(
        project=project,
        name=name,
        # Not the name alone: that is the id of a client of ART's that reports by itself.
        id=f"{name}-server",
        resume="allow",
        reinit="create_new",
        dir=directory,
        # The process holds no code of the user's, and its console is ours.
        settings=wandb.Settings(console="off", disable_git=True),
    )
    run.define_metric("training_step")
    run.define_metric("*", step_metric="training_step")
    return run


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it has rows to send
    runs = Runs()
    serve({"log": runs.log, "finish": runs.finish})


if __name__ == "__main__":
    main()
