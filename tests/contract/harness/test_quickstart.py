"""The quickstart with real processes: Ctrl-C, and continuing with the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.environments import client_environment
from tests.serving import Serving

ROOT = Path(__file__).parents[3]
EPOCHS = 4
# Options of several puzzles, so each reply is right for some puzzles and worthless for others.
REPLIES = ["A: Rose", "A: Gray", "B: rope", "B: knife", "C: hall", "D: noon", "nothing"]


def test_ctrl_c_stops_the_quickstart_and_the_same_command_continues(
    tmp_path: Path, art_cache: str
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"when": "weapon, room", "replies": REPLIES}]))
    program = ("trainer.testing", str(script))
    with Serving(tmp_path, "tiny-random", program=program, ART_CACHE=art_cache) as server:
        output_dir = tmp_path / "out"
        ports = [str(urlsplit(url).port) for url in (server.control, server.openai)]
        command = [
            *(sys.executable, "-m", "examples.temporal_clue.quickstart"),
            *("--port", ports[0], "--openai-port", ports[1], "--base-model", "tiny-random"),
            *("--state-dir", str(server.state), "--output-dir", str(output_dir)),
            *("--epochs", str(EPOCHS)),
        ]
        # In a new process group, as in a terminal: Ctrl-C reaches all of its processes.
        first = subprocess.Popen(
            command,
            cwd=ROOT,
            env=client_environment(),
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        metrics = output_dir / "training_metrics.jsonl"
        while first.poll() is None and not (metrics.is_file() and metrics.read_text()):
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGINT)
        output = first.communicate(timeout=60)[1]
        assert first.returncode == 130, output
        assert "Stopped; run the same command again to continue" in output
        assert "Traceback" not in output
        with pytest.raises(ProcessLookupError):
            os.killpg(first.pid, 0)  # its process group is empty
        done = len(metrics.read_text().splitlines())
        assert 1 <= done < EPOCHS

        second = subprocess.run(
            command, cwd=ROOT, env=client_environment(), capture_output=True, text=True, timeout=300
        )
        assert second.returncode == 0, second.stderr
        assert f"Trained {EPOCHS} steps" in second.stderr
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
        checkpoints = server.state / "examples" / "models" / "temporal-clue" / "checkpoints"
        # Only the newest checkpoints are kept, not one for every step.
        assert len(list(checkpoints.iterdir())) <= 2
