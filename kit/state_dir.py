"""The state directory, `.art`: the names inside it, and functions that build paths in it.

    .art/pulled                                          checkpoints that were pulled
    .art/logs/engine.log                                 one file per worker process
    .art/PROJECT/models/NAME/run.json                    the names of a run that has two
    .art/PROJECT/models/NAME/history.jsonl               metrics, one object per line
    .art/PROJECT/models/NAME/trajectories/SPLIT/0007.jsonl
    .art/PROJECT/models/NAME/checkpoints/0007/           one checkpoint, see `kit.manifest`

The layout is ART's. The server writes these files and the launcher reads them.
"""

import re
from pathlib import Path

STATE_DIR = ".art"
PULLED = "pulled"
"""File in which `launcher pull` lists the checkpoints it has pulled, as PROJECT/NAME/STEP."""
LOGS = "logs"
MODELS = "models"
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
HISTORY = "history.jsonl"
RUN = "run.json"
"""File with the `name` and `run_name` of a model; one that was stored under `name` has none."""

MODEL_GLOB = f"*/{MODELS}/*"
"""Every model's directory, relative to the state directory."""
CHECKPOINT_GLOB = f"{MODEL_GLOB}/{CHECKPOINTS}/[0-9]*"
"""Every checkpoint, finished or not, relative to the state directory."""
HISTORY_GLOB = f"{MODEL_GLOB}/{HISTORY}"
STEP_NAME = re.compile(r"\d{4,}")
"""Matches a finished checkpoint. An unfinished one is called `.0007-xyz` until it is renamed."""


def step_name(step: int) -> str:
    """The name of a step in file names: `0007` for step 7."""
    return f"{step:04d}"


def model_path(state: Path, project: str, name: str) -> Path:
    return state / project / MODELS / name


def checkpoint_path(model: Path, step: int) -> Path:
    """The directory of a model's checkpoint at `step`."""
    return model / CHECKPOINTS / step_name(step)


def checkpoint_name(path: Path) -> str:
    """The name of the checkpoint at `path` as `PULLED` lists it: `PROJECT/NAME/STEP`."""
    project, _, name, _, step = path.parts[-5:]
    return f"{project}/{name}/{step}"
