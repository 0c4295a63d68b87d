"""The state directory, `.art`: the names inside it and how a path there is built.

    .art/pulled                                          checkpoints that are safe at home
    .art/logs/engine.log                                 one file per worker process
    .art/PROJECT/models/NAME/history.jsonl               metrics, one object per line
    .art/PROJECT/models/NAME/trajectories/SPLIT/0007.jsonl
    .art/PROJECT/models/NAME/checkpoints/0007/           one checkpoint, see `kit.manifest`

The layout is ART's. The server writes it and the launcher reads it, so both use these names.
"""

import re
from pathlib import Path

STATE_DIR = ".art"
PULLED = "pulled"
"""File in which `launcher pull` lists what is safe at home, as PROJECT/NAME/STEP."""
LOGS = "logs"
MODELS = "models"
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
HISTORY = "history.jsonl"

MODEL_GLOB = f"*/{MODELS}/*"
"""Every model's directory, relative to the state directory."""
CHECKPOINT_GLOB = f"{MODEL_GLOB}/{CHECKPOINTS}/[0-9]*"
"""Every checkpoint, finished or not, relative to the state directory."""
HISTORY_GLOB = f"{MODEL_GLOB}/{HISTORY}"
STEP_NAME = re.compile(r"\d{4,}")
"""Matches a finished checkpoint: one in the making is `.0007-xyz` until it is renamed."""


def step_name(step: int) -> str:
    """The name of a step's files: step 7 is `0007`."""
    return f"{step:04d}"


def model_path(state: Path, project: str, name: str) -> Path:
    return state / project / MODELS / name


def checkpoint_path(model: Path, step: int) -> Path:
    """The checkpoint of `step` below a model's directory."""
    return model / CHECKPOINTS / step_name(step)


def checkpoint_name(path: Path) -> str:
    """`PROJECT/NAME/STEP` of the checkpoint at `path`, as `PULLED` lists it."""
    project, _, name, _, step = path.parts[-5:]
    return f"{project}/{name}/{step}"
