"""The last words of a server whose lease is over: what would be lost with its cluster."""

import math
import time
from pathlib import Path

from kit.state_dir import CHECKPOINT_GLOB, PULLED, checkpoint_name


def farewell(state: Path, bucket: str | None) -> list[str]:
    """Lines for the log, none when every checkpoint is safe."""
    missing = unpulled(state)
    if not missing:
        return []
    what = f"{len(missing)} checkpoint{'s' * (len(missing) > 1)}: {', '.join(missing)}"
    if bucket:
        return [f"not pulled, but safe in {bucket}: {what}"]
    return [
        f"NOT PULLED, and lost when the cluster is torn down in some minutes: {what}",
        "bring them home now with `launcher pull`",
    ]


def minutes_since_pull(state: Path) -> float:
    """Since `launcher pull` last wrote its note, which it does again and again while it runs."""
    try:
        return (time.time() - (state / PULLED).stat().st_mtime) / 60
    except OSError:
        return math.inf


def unpulled(state: Path) -> list[str]:
    """Trained checkpoints that nobody has brought home, as PROJECT/NAME/STEP."""
    try:
        safe = set((state / PULLED).read_text().split())
    except OSError:
        safe = set()
    found = [
        checkpoint_name(path)
        for path in sorted(state.glob(CHECKPOINT_GLOB))
        if path.name.isdigit() and int(path.name) > 0  # step 0 is made, not trained
    ]
    return [name for name in found if name not in safe]
