"""Reports to W&B: with the real library offline, and from a real server to a fake library."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.contract.harness.test_reporting import READ_WANDB, run_code
from tests.environments import client_environment, python_of
from tests.serving import Serving

REPORT = """
import asyncio, logging, sys
from pathlib import Path
from trainer.server import wandb_reports
from trainer.server.wandb_reports import WandbReports

wandb_reports.PATIENCE = 120  # a busy machine imports wandb slowly
logging.basicConfig(level=logging.INFO)

async def main():
    reports = WandbReports("a-key", Path(sys.argv[1]))
    for step, reward in ((1, 0.25), (2, 0.75)):
        reports.send("clue", "agent", step, {"train/reward": reward, "canary": float("nan")})
    reports.send("clue", "agent", 2, {"val/reward": 0.5})
    reports.send("clue", "other", 1, {"train/reward": 1.0})
    await reports.stop()

asyncio.run(main())
"""

# The server's process imports this instead of wandb. It writes every call to a file.
FAKE = """
import json, os
from pathlib import Path

def Settings(**settings): return settings

class Run:
    def __init__(self, about):
        self.url = f"https://wandb.test/{about['project']}/runs/{about['id']}"
        self.dir = about["dir"]
        self._write({"init": about, "key": os.environ["WANDB_API_KEY"]})
    def define_metric(self, *arguments, **named): pass
    def log(self, numbers): self._write(numbers)
    def finish(self): self._write({"finished": True})
    def _write(self, call):
        with Path(os.environ["FAKE_WANDB"]).open("a") as file:
            file.write(json.dumps(call) + "\\n")

def init(**about):
    if about["project"] == "away": raise RuntimeError("no such host")
    return Run(about)
"""
TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]


def test_the_real_wandb_gets_every_row_in_its_models_run(tmp_path: Path) -> None:
    python = python_of("reporting")
    done = subprocess.run(
        [str(python), "-c", REPORT, str(tmp_path)],
        env={**client_environment(), "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "clue/agent at W&B: " in done.stderr and "do not reach" not in done.stderr
    logs = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in logs] == ["run-agent-server", "run-other-server"]
    rows = run_code(python, READ_WANDB, str(logs[0]))
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows] == [
        {"train/reward": 0.25, "training_step": 1},
        {"train/reward": 0.75, "training_step": 2},
        {"val/reward": 0.5, "training_step": 2},
    ]


def serve(directory: Path, art_cache: str, **environment: str) -> Serving:
    (directory / "fake").mkdir(parents=True)
    (directory / "fake" / "wandb.py").write_text(FAKE)
    calls = str(directory / "calls.jsonl")
    variables = {"ART_CACHE": art_cache, "FAKE_WANDB": calls, **environment}
    return Serving(directory, "tiny-random", WANDB_API_KEY="a-key", **variables)


def model(server: Serving, project: str) -> dict[str, Any]:
    wire = {"name": "agent", "project": project, "base_model": "tiny-random"}
    server.post("/_prepare_backend_for_training", {"model": wire})
    return wire


def train(server: Serving, wire: dict[str, Any]) -> None:
    body = {"model": wire, "trajectories": [{"messages_and_choices": TALK}]}
    httpx.post(f"{server.control}/_train_sft", json=body, timeout=120).raise_for_status()


def wait_for(path: Path, message: str) -> str:
    for _ in range(300):
        if path.is_file() and message in (text := path.read_text()):
            return text
        time.sleep(0.1)
    raise AssertionError(f"{path} never held {message}")


def test_a_server_reports_its_steps_and_what_clients_log(tmp_path: Path, art_cache: str) -> None:
    with serve(tmp_path, art_cache, PYTHONPATH=str(tmp_path / "fake")) as server:
        wire, away = model(server, "clue"), model(server, "away")
        train(server, wire)
        group = {"trajectories": [{"reward": 0.25}, {"reward": 0.75}], "exceptions": []}
        server.post("/_log", {"model": wire, "trajectory_groups": [group], "split": "val"})
        train(server, away)  # the step is trained although W&B cannot be reached
        assert server.post("/_get_step", away) == 1
        log = wait_for(server.log, "do not reach W&B: RuntimeError: no such host")
    assert "clue/agent at W&B: https://wandb.test/clue/runs/agent-server" in log
    calls = (tmp_path / "calls.jsonl").read_text().splitlines()
    # The canary reports when its check is done, which may be after the client's line.
    rows = [row for row in map(json.loads, calls) if "canary/bound" not in row]
    start, step, validation, end = rows
    assert start["key"] == "a-key" and start["init"]["project"] == "clue"
    assert step["training_step"] == 1 and step["loss/train"] > 0 and step["time/step_s"] > 0
    assert validation["training_step"] == 1 and validation["val/reward"] == 0.5
    assert end == {"finished": True}


def test_a_key_without_wandb_logs_one_warning_and_loses_nothing(
    tmp_path: Path, art_cache: str
) -> None:
    assert subprocess.run([sys.executable, "-c", "import wandb"], capture_output=True).returncode
    (tmp_path / "wandb").mkdir()  # the directory of an offline run is not the library
    with serve(tmp_path, art_cache) as server:
        train(server, model(server, "clue"))
        warnings = [line for line in server.log.read_text().splitlines() if "WANDB" in line]
    assert len(warnings) == 1 and "`pip install wandb`" in warnings[0]
    history = (server.state / "clue/models/agent/history.jsonl").read_text()
    assert history.count("time/step_s") == 1
