"""The backend is killed during a step: the harness waits, and the step is trained once."""

import signal
import subprocess
from pathlib import Path

from tests.contract.harness.conftest import Project, guide, write_project
from tests.environments import client_environment
from tests.serving import Serving


def test_the_harness_waits_for_a_backend_killed_during_training(
    tmp_path: Path, art_cache: str
) -> None:
    (tmp_path / "server-row").touch()
    environment = {"ART_CACHE": art_cache, "ART_FAULTS": str(tmp_path)}
    with Serving(tmp_path / "server", "tiny-random", **environment) as serving:
        project = Project(tmp_path, guide(serving, "restarted"))
        write_project(tmp_path)
        process = subprocess.Popen(
            project.command("-o", "finetuning.num_epochs", "2"),
            cwd=tmp_path,
            env=client_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr
        lines, killed = [], False
        with process.stderr:
            for line in process.stderr:
                lines.append(line)
                if "Submitted" in line and not killed:
                    killed = True
                    assert serving.process.wait(300) == -signal.SIGKILL  # by `ART_FAULTS`, mid-step
                    serving.start()
        assert process.wait(300) == 0, "".join(lines)
        metrics = project.read("training_metrics.jsonl")
        assert [(row["epoch"], row["step"]) for row in metrics] == [(1, 1), (2, 2)]
        assert any("Lost the connection to the backend during training" in line for line in lines)
