"""The backend dies in the middle of a step: the harness waits, and the step is made once."""

import signal
import subprocess
from pathlib import Path

from tests.contract.harness.conftest import Project, guide, write_project
from tests.environments import client_environment
from tests.serving import Serving


def test_a_backend_that_is_killed_while_it_trains_is_waited_for(
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
        told, killed = [], False
        with process.stderr:
            for line in process.stderr:
                told.append(line)
                if "Submitted" in line and not killed:
                    killed = True
                    assert serving.process.wait(300) == -signal.SIGKILL  # by itself, in mid-step
                    serving.start()
        assert process.wait(300) == 0, "".join(told)
        metrics = project.read("training_metrics.jsonl")
        assert [(row["epoch"], row["step"]) for row in metrics] == [(1, 1), (2, 2)]
        assert any("The backend went away while it trained" in line for line in told)
