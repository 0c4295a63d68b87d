"""The process that runs wandb: `python -m trainer.server.wandb_worker`, see `wandb_reports`."""

import os
import signal
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.processes.worker import serve


class WandbRuns:
    """A W&B run for each model, started with its first row and resumed by later servers."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], Any] = {}

    def log(self, key: str, directory: str, project: str, name: str, numbers: Json) -> str:
        """Log a row, and return the URL of the run, or its directory if offline."""
        run = self._runs.get((project, name))
        if run is None:
            run = self._runs[project, name] = _start(key, directory, project, name)
        # No `step` here: validations arrive late or twice for a step, and W&B's steps only rise.
        run.log(numbers)
        return str(run.url or Path(run.dir).parent)

    def finish(self) -> None:
        for run in self._runs.values():
            run.finish()
        self._runs.clear()


def _start(key: str, directory: str, project: str, name: str) -> Any:
    import wandb

    os.environ["WANDB_API_KEY"] = key  # wandb does not read `.env`
    run = wandb.init(
        project=project,
        name=name,
        # The plain name is the id that ART's clients use when they report themselves.
        id=f"{name}-server",
        resume="allow",
        reinit="create_new",
        dir=directory,
        # This process runs no code of the user, and its console is the server's.
        settings=wandb.Settings(console="off", disable_git=True),
    )
    run.define_metric("training_step")
    run.define_metric("*", step_metric="training_step")
    return run


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    runs = WandbRuns()
    serve({"log": runs.log, "finish": runs.finish})


if __name__ == "__main__":
    main()
