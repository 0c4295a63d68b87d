"""What reaches W&B: with the real library offline, and from a real server to a fake one."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.contract.harness.test_reporting import READ_WANDB, ask
from tests.environments import client_environment, python_of
from tests.serving import Serving

REPORT = """
import asyncio, logging, sys
from pathlib import Path
from trainer.server import reports as module
from trainer.server.wandb_reports import WandbReports

module.PATIENCE = 120  # to import wandb takes as long as it takes
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

# What the server's process sees in place of wandb: it writes down what it is told.
FAKE = """
import json, os
from pathlib import Path

def Settings(**settings): return settings

class Run:
    def __init__(self, about):
        self.url = f"https://wandb.test/{about['project']}/runs/{about['id']}"
        self.dir = about["dir"]
        self._say({"init": about, "key": os.environ["WANDB_API_KEY"]})
    def define_metric(self, *arguments, **named): pass
    def log(self, numbers): self._say(numbers)
    def finish(self): self._say({"finished": True})
    def _say(self, what):
        with Path(os.environ["FAKE_WANDB"]).open("a") as file:
            file.write(json.dumps(what) + "\\n")

def init(**about):
    if about["project"] == "away": raise RuntimeError("no such host")
    return Run(about)
"""
TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]


def test_the_real_wandb_gets_every_row_in_a_run_of_its_model(tmp_path: Path) -> None:
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
    rows = ask(python, READ_WANDB, str(logs[0]))
    told = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
    assert told == [
        {"train/reward": 0.25, "training_step": 1},
        {"train/reward": 0.75, "training_step": 2},
        {"val/reward": 0.5, "training_step": 2},
    ]


def serve(directory: Path, art_cache: str, **environment: str) -> Serving:
    (directory / "fake").mkdir(parents=True)
    (directory / "fake" / "wandb.py").write_text(FAKE)
    said = str(directory / "said.jsonl")
    variables = {"ART_CACHE": art_cache, "FAKE_WANDB": said, **environment}
    return Serving(directory, "tiny-random", WANDB_API_KEY="a-key", **variables)


def model(server: Serving, project: str) -> dict[str, Any]:
    wire = {"name": "agent", "project": project, "base_model": "tiny-random"}
    server.post("/_prepare_backend_for_training", {"model": wire})
    return wire


def train(server: Serving, wire: dict[str, Any]) -> None:
    body = {"model": wire, "trajectories": [{"messages_and_choices": TALK}]}
    httpx.post(f"{server.control}/_train_sft", json=body, timeout=120).raise_for_status()


def wait_for(path: Path, says: str) -> str:
    for _ in range(300):
        if path.is_file() and says in (text := path.read_text()):
            return text
        time.sleep(0.1)
    raise AssertionError(f"{path} never said {says}")


def test_a_server_reports_its_steps_and_what_clients_log(tmp_path: Path, art_cache: str) -> None:
    with serve(tmp_path, art_cache, PYTHONPATH=str(tmp_path / "fake")) as server:
        wire, away = model(server, "clue"), model(server, "away")
        train(server, wire)
        group = {"trajectories": [{"reward": 0.25}, {"reward": 0.75}], "exceptions": []}
        server.post("/_log", {"model": wire, "trajectory_groups": [group], "split": "val"})
        train(server, away)  # W&B cannot be reached for this one: the step is made all the same
        assert server.post("/_get_step", away) == 1
        log = wait_for(server.log, "do not reach W&B: RuntimeError: no such host")
    assert "clue/agent at W&B: https://wandb.test/clue/runs/agent-server" in log
    said = (tmp_path / "said.jsonl").read_text().splitlines()
    # The canary's check is reported when it is done, which may be after the client's own line.
    rows = [row for row in map(json.loads, said) if "canary/bound" not in row]
    begun, step, validation, end = rows
    assert begun["key"] == "a-key" and begun["init"]["project"] == "clue"
    assert step["training_step"] == 1 and step["loss/train"] > 0 and step["time/step_s"] > 0
    assert validation["training_step"] == 1 and validation["val/reward"] == 0.5
    assert end == {"finished": True}


def test_a_key_without_wandb_is_told_in_a_line_and_nothing_is_lost(
    tmp_path: Path, art_cache: str
) -> None:
    assert subprocess.run([sys.executable, "-c", "import wandb"], capture_output=True).returncode
    (tmp_path / "wandb").mkdir()  # what an offline run leaves is not the library
    with serve(tmp_path, art_cache) as server:
        train(server, model(server, "clue"))
        told = [line for line in server.log.read_text().splitlines() if "WANDB" in line]
    assert len(told) == 1 and "`pip install wandb`" in told[0]
    history = (server.state / "clue/models/agent/history.jsonl").read_text()
    assert history.count("time/step_s") == 1
