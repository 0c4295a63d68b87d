"""Directories that a checkpoint is written into outlive a power cut."""

import json
import os
import subprocess
import sys
from pathlib import Path

RECORDER = Path(__file__).parents[1] / "faults" / "recorder"
SAVE = """
import sys
from pathlib import Path
from trainer import checkpoint

checkpoint.save(Path(sys.argv[1]), 0, lambda directory: None, {})
"""


def test_every_directory_above_a_checkpoint_is_synced_with_its_name(tmp_path: Path) -> None:
    synced, state = tmp_path / "synced", tmp_path / ".art"
    synced.mkdir()
    state.mkdir()
    target = state / "project" / "models" / "run" / "checkpoints"
    path = os.pathsep.join([str(RECORDER), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", SAVE, str(target)],
        env={**os.environ, "PYTHONPATH": path, "RECORD_SYNCED": str(synced)},
        check=True,
    )
    for directory in (target, *target.parents):
        if directory == state:
            break
        names = json.loads((synced / str(directory.parent.stat().st_ino)).read_bytes())
        assert directory.name in names
