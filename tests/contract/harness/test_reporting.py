"""`report_to` with the real client libraries, offline or on loopback."""

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.environments import client_environment, python_of

SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace

from trainer.harness.config import FinetuneConfig
from trainer.harness.reporting import load_reporters

name, output = sys.argv[1], Path(sys.argv[2])
config = FinetuneConfig.model_validate({
    "workflow": {"_type": "python", "function": "a:b", "llm": "m"},
    "trainer_adapters": {"a": {"_type": "openpipe_art_trainer_adapter",
                               "backend": {"ip": "127.0.0.1", "port": 1, "project": "clue"}}},
    "finetuning": {"report_to": [name], "output_dir": output},
})
adapter = SimpleNamespace(config=config.trainer_adapters["a"])
context = SimpleNamespace(config=config, output_dir=output, trainer_adapter=adapter)
(reporter,) = load_reporters(context, "art_run_1")
reporter.log(1, {"avg_reward": 0.25, "loss/policy": 0.5})
reporter.log(2, {"avg_reward": 0.75, "loss/policy": 0.25})
reporter.close()
"""

# W&B's offline file has LevelDB's log format: 32 KiB blocks, and records with a 7-byte header.
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

data, at, found, whole = Path(sys.argv[1]).read_bytes(), 7, [], b""
while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
        at += left
        continue
    _, size, kind = struct.unpack("<IHB", data[at:at + 7])
    whole += data[at + 7:at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        record, whole = Record.FromString(whole), b""
        if record.history.item:
            found.append({(item.key or item.nested_key[0]): json.loads(item.value_json)
                          for item in record.history.item})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("reporting")


def report(python: Path, name: str, output: Path, **environment: str) -> None:
    done = subprocess.run(
        [str(python), "-c", SCRIPT, name, str(output)],
        cwd=output,
        env={**client_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


def run_code(python: Path, code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [str(python), "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class Service(BaseHTTPRequestHandler):
    """Accepts every request and keeps it."""

    requests: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        text = body.decode(errors="replace")
        self.requests.append((self.path, json.loads(text) if text.startswith(("{", "[")) else text))
        answer = b'{"status": "ok", "successes": [], "errors": []}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    requests: list[tuple[str, Any]] = []
    handler = type("Recorder", (Service,), {"requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


def test_wandb_records_every_epoch_offline(python: Path, tmp_path: Path) -> None:
    report(python, "wandb", tmp_path, WANDB_MODE="offline")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = run.glob("*.wandb")
    rows = run_code(python, READ_WANDB, str(log))
    assert [(row["_step"], row["avg_reward"]) for row in rows] == [(1, 0.25), (2, 0.75)]


def test_tensorboard_records_every_epoch_in_its_event_file(python: Path, tmp_path: Path) -> None:
    report(python, "tensorboard", tmp_path)
    code = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps([[e.step, e.value] for e in events.Scalars("avg_reward")]))
"""
    found = run_code(python, code, str(tmp_path / "tensorboard" / "art_run_1"))
    assert found == [[1, 0.25], [2, 0.75]]


def test_mlflow_records_every_epoch_in_its_store(python: Path, tmp_path: Path) -> None:
    report(
        python,
        "mlflow",
        tmp_path,
        MLFLOW_TRACKING_URI=f"file:{tmp_path}/mlruns",
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    (metric,) = (tmp_path / "mlruns").rglob("metrics/avg_reward")
    rows = [line.split() for line in metric.read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step in rows] == [(0.25, 1), (0.75, 2)]


def test_langfuse_receives_a_score_for_every_metric(
    python: Path, tmp_path: Path, service: tuple[str, list[tuple[str, Any]]]
) -> None:
    url, requests = service
    keys = {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk"}
    report(python, "langfuse", tmp_path, **keys, LANGFUSE_HOST=url, LANGFUSE_BASE_URL=url)
    scores = [score for path, body in requests if path.endswith("/scores") for score in body]
    assert sorted((s["name"], s["value"]) for s in scores) == [
        ("avg_reward", 0.25), ("avg_reward", 0.75), ("loss/policy", 0.25), ("loss/policy", 0.5),
    ]  # fmt: skip


def test_openpipe_receives_a_report_for_every_epoch(
    python: Path, tmp_path: Path, service: tuple[str, list[tuple[str, Any]]]
) -> None:
    url, requests = service
    report(python, "openpipe", tmp_path, OPENPIPE_API_KEY="k", OPENPIPE_BASE_URL=url)
    reports = [body for path, body in requests if path.endswith("/report")]
    found = [(r["tags"]["epoch"], r["tags"]["avg_reward"]) for r in reports]
    assert found == [("1", "0.25"), ("2", "0.75")]
