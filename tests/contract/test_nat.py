"""`nat finetune` as in NVIDIA's guide, with the script that we ship for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import ROOT, client_environment, python_of
from tests.serving import free_port, vllm_python
from trainer.page import groups
from trainer.page import reader as page_reader

RUNS = (("0.5.17", "embedded"), ("0.5.18", "vllm"))


class Run:
    """The example with one version of openpipe-art, on its own loopback address."""

    def __init__(self, nat: Path, engine: str, host: str, directory: Path) -> None:
        # NAT always uses port 8000, so concurrent runs need different addresses.
        shutil.copytree(ROOT / "examples" / "nat", directory, ignore=shutil.ignore_patterns(".*"))
        self.state = directory / "art"
        self._process = subprocess.Popen(
            [str(directory / "run.sh"), "2"],
            env={
                **client_environment(),
                "HOST": host,
                "PORT": str(free_port()),
                "STATE": str(self.state),
                "ENGINE": engine,
                **({"ART_VLLM": vllm_python()} if engine == "vllm" else {}),
                "TRAINER": str(Path(sys.executable).with_name("trainer")),
                "NAT": str(nat),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Stop the script, its server and NAT if a failed test left them running."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.communicate(timeout=60)

    def finish(self, *, code: int = 0) -> str:
        output, _ = self._process.communicate(timeout=1600)
        assert self._process.returncode == code, output[-8000:]
        return output


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Run]]:
    """Start all selected runs at once, because NAT spends most of the time polling."""
    names = {item.name.partition("[")[2] for item in request.session.items}
    selected = [run for run in RUNS if f"{'-'.join(run)}]" in names]
    pythons = [python_of(f"nat-{version}", "examples/nat") for version, _ in selected]
    started: dict[tuple[str, str], Run] = {}
    try:
        for index, run in enumerate(selected):
            directory = tmp_path_factory.mktemp("nat") / "project"
            nat = pythons[index].with_name("nat")
            started[run] = Run(nat, run[1], f"127.0.0.{10 + index}", directory)
        yield started
    finally:
        for one in started.values():
            one.stop()


@pytest.mark.timeout(2400)  # the first test creates two environments
@pytest.mark.parametrize(("version", "engine"), RUNS)
def test_nat_finetunes_with_openpipe_art(
    runs: dict[tuple[str, str], Run], version: str, engine: str
) -> None:
    run = runs[version, engine]
    assert "trained to step 2" in run.finish()
    history = run.state / "my_project" / "models" / "my_training_run" / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    lines = [line for line in lines if "time/step_s" in line]  # skip the canary's lines
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["data/step_num_trajectories"] == 12
        assert line["data/retokenized"] == 0
        # Set in the YAML. NAT sends it only in the model's internal config.
        assert line["loss/learning_rate"] == 1e-3
    page = page_reader.Run("my_project", "my_training_run", history.parent)
    found = groups.step(page, 1)["groups"]  # recorded before the second step was sampled
    assert sum(group["n"] for group in found) == 12
    assert groups.tokens(page, 1, 1)["total"] > 0


def test_the_script_fails_if_nat_exits_0_without_training(tmp_path: Path) -> None:
    run = Run(Path("/bin/true"), "embedded", "127.0.0.20", tmp_path / "project")
    assert "error: Model `my_training_run`" in run.finish(code=1)
