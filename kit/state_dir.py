"""The state directory, `.art`: the names inside it, and functions that build paths in it.

    .art/pulled                                          checkpoints that were pulled
    .art/dollars-per-hour                                what the cluster costs
    .art/logs/engine.log                                 one file per worker process
    .art/.compiled/                                      compiled code for the next machine
    .art/PROJECT/models/NAME/run.json                    the names of a run that has two
    .art/PROJECT/models/NAME/history.jsonl               metrics, one object per line
    .art/PROJECT/models/NAME/trajectories/SPLIT/0007.jsonl
    .art/PROJECT/models/NAME/batches/0007.db             a trained step: its attempts and tokens
    .art/PROJECT/models/NAME/batches/groups.jsonl        means of each group of each step
    .art/PROJECT/models/NAME/evals/NAME.jsonl            what `trainer eval` measured
    .art/PROJECT/models/NAME/checkpoints/0007/           one checkpoint, see `kit.manifest`

The layout is ART's. The server writes these files and the launcher reads them.
"""

import contextlib
import re
from pathlib import Path

STATE_DIR = ".art"
PULLED = "pulled"
"""File in which `launcher pull` lists the checkpoints it has pulled, as PROJECT/NAME/STEP."""
PRICE = "dollars-per-hour"
"""File in which `launcher up` writes what the cluster costs."""
LOGS = "logs"
COMPILED = ".compiled"
MODELS = "models"
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
BATCHES = "batches"
GROUPS = "groups.jsonl"
"""File in `BATCHES` that keeps the means of groups after the files of their steps are deleted."""
HISTORY = "history.jsonl"
EVALS = "evals"
RUN = "run.json"
"""File with the `name` and `run_name` of a model; one that was stored under `name` has none."""

DATABASES = ("ledger.db", "rollouts.db", "responses.db", "threads.db")
SERVING = "serving.json"
RESERVED = {
    *(PULLED, PRICE, LOGS, COMPILED, MODELS, CHECKPOINTS, TRAJECTORIES, HISTORY, RUN, SERVING),
    "wandb",
}
"""Names inside the state directory that no project and no model may have."""

MODEL_GLOB = f"*/{MODELS}/*"
"""Every model's directory, relative to the state directory."""
CHECKPOINT_GLOB = f"{MODEL_GLOB}/{CHECKPOINTS}/[0-9]*"
"""Every checkpoint, finished or not, relative to the state directory."""
HISTORY_GLOB = f"{MODEL_GLOB}/{HISTORY}"
EVALS_GLOB = f"{MODEL_GLOB}/{EVALS}/*.jsonl"
ROLLOUT_GLOBS = (
    f"{MODEL_GLOB}/{BATCHES}/[0-9]*.db",
    f"{MODEL_GLOB}/{BATCHES}/{GROUPS}",
    f"{MODEL_GLOB}/{TRAJECTORIES}/*/*.jsonl",
)
"""The attempts of every step, finished ones only, relative to the state directory."""
STEP_NAME = re.compile(r"\d{4,}")
"""Matches a finished checkpoint. An unfinished one is called `.0007-xyz` until it is renamed."""


def is_reserved(name: str) -> bool:
    """Whether a name is that of our own files, or of one that belongs to them."""
    name = name.casefold()  # as some file systems compare names
    own = {*RESERVED, *DATABASES}
    return name in own or name.startswith((*(f"{one}{mark}" for one in own for mark in "-."),))


def ignore_in_git(directory: Path) -> None:
    """Keep a directory of ours out of the user's repository, and out of what goes to a cluster."""
    with contextlib.suppress(OSError):  # whoever needs the directory says why it cannot be written
        directory.mkdir(parents=True, exist_ok=True)
        if not (ignore := directory / ".gitignore").exists():
            ignore.write_text("*\n")


def step_name(step: int) -> str:
    """The name of a step in file names: `0007` for step 7."""
    return f"{step:04d}"


def model_path(state: Path, project: str, name: str) -> Path:
    return state / project / MODELS / name


def checkpoint_path(model: Path, step: int) -> Path:
    """The directory of a model's checkpoint at `step`."""
    return model / CHECKPOINTS / step_name(step)


def names_in_path(path: Path) -> tuple[str, str]:
    """The project and the name of the run of a checkpoint, from its place in this layout.

    Elsewhere, as in `NAME/0024`, the directory around it names the run.
    """
    parts = path.resolve().parts
    if len(parts) > 4 and (parts[-4], parts[-2]) == (MODELS, CHECKPOINTS):
        return parts[-5], parts[-3]
    name = parts[-2] if STEP_NAME.fullmatch(parts[-1]) and len(parts) > 1 else parts[-1]
    return "served", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def checkpoint_name(path: Path) -> str:
    """The name of the checkpoint at `path` as `PULLED` lists it: `PROJECT/NAME/STEP`."""
    project, _, name, _, step = path.parts[-5:]
    return f"{project}/{name}/{step}"
