"""`nat finetune` as NVIDIA's guide has it, by the script that we ship for it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import ROOT, client_environment, python_of
from tests.serving import free_port

VERSIONS = ("0.5.17", "0.5.18")


class Run:
    """The example with one version of openpipe-art, on a loopback address of its own."""

    def __init__(self, version: str, host: str, directory: Path) -> None:
        # NAT always asks port 8000, so that two runs at once need two addresses.
        shutil.copytree(ROOT / "examples" / "nat", directory, ignore=shutil.ignore_patterns(".*"))
        self.state = directory / "art"
        self._process = subprocess.Popen(
            [str(directory / "run.sh"), "2"],
            env={
                **client_environment(),
                "HOST": host,
                "PORT": str(free_port()),
                "STATE": str(self.state),
                "TRAINER": str(Path(sys.executable).with_name("trainer")),
                "NAT": str(python_of(f"nat-{version}", "examples/nat").with_name("nat")),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> str:
        output, _ = self._process.communicate(timeout=400)
        assert self._process.returncode == 0, output[-8000:]
        return output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Both at once: most of their time is NAT's polling."""
    for version in VERSIONS:
        python_of(f"nat-{version}", "examples/nat")
    return {
        version: Run(version, f"127.0.0.{10 + index}", tmp_path_factory.mktemp("nat") / "project")
        for index, version in enumerate(VERSIONS)
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_nat_finetunes_with_openpipe_art(runs: dict[str, Run], version: str) -> None:
    run = runs[version]
    assert "trained to step 2" in run.finish()
    history = run.state / "my_project" / "models" / "my_training_run" / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["data/step_num_trajectories"] == 12
        assert line["data/retokenized"] == 0
        # The YAML's, which NAT sends only in the model's internal config.
        assert line["loss/learning_rate"] == 1e-3
