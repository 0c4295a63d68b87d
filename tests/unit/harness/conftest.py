"""A scripted OpenAI endpoint, and a project that `trainer eval` measures against it."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from kit.errors import KitError
from trainer.cli import cli

SERVED = ["tiny", "tiny@base", "agent", "agent@1", "agent@2"]
AGENT = """
async def answer(example, llm):
    return (await llm.chat([{"role": "user", "content": example.question}]))["content"]

def partly(run):
    return 0.5 if run.output == run.example.answer else 0.0

def explained(run):
    return {"reward": partly(run), "reason": f"I read <{run.output}>"}
"""


class Endpoint:
    """Lists `served`; `reply(model, question, number)` answers, and may return a status."""

    def __init__(self) -> None:
        self.url = ""
        self.served: list[str] | None = SERVED
        self.key: str | None = None
        self.bodies: list[Any] = []
        self.calls: Counter[tuple[str, str]] = Counter()
        self.reply: Callable[[str, str, int], Any] = right_from(("agent@2", 0), ("agent@1", 2))


def right_from(*scores: tuple[str, int]) -> Callable[[str, str, int], Any]:
    """A model knows the answers of the questions from a number on."""
    known = dict(scores)
    return lambda model, question, _: question if int(question) >= known.get(model, 99) else "?"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.key and self.headers["authorization"] != f"Bearer {state.key}":
                self._send(401, {})
            elif self.path == "/v1/models" and state.served is not None:
                self._send(200, {"data": [{"id": name} for name in state.served]})
            else:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            question = body["messages"][-1]["content"]
            state.bodies.append(body)
            state.calls[body["model"], question] += 1
            number = state.calls[body["model"], question]
            text = state.reply(body["model"], question, number)
            if isinstance(text, int):
                self._send(text, {"error": {"message": "scripted"}})
                return
            message = {"role": "assistant", "content": text}
            self._send(
                200, {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
            )

        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield state
        server.shutdown()


class Project:
    """A directory with a config, an agent and eight questions."""

    def __init__(self, directory: Path, endpoint: Endpoint) -> None:
        self.directory = directory
        llm = {"_type": "openai", "model_name": "agent", "base_url": endpoint.url, "max_retries": 0}
        self.config: Any = {
            "llms": {"policy": llm},
            "workflow": {"_type": "python", "function": "eval_agent:answer", "llm": "policy"},
            "eval": {
                "general": {"dataset": {"_type": "json", "file_path": "questions.json"}},
                "evaluators": {"right": {"_type": "exact_match"}},
            },
            "finetuning": {"output_dir": "out"},
        }
        self.write_questions(8)
        (directory / "eval_agent.py").write_text(AGENT)

    def write_questions(self, count: int) -> None:
        rows = [{"id": f"q{n}", "question": str(n), "answer": str(n)} for n in range(count)]
        (self.directory / "questions.json").write_text(json.dumps(rows))

    @property
    def file(self) -> Path:
        return self.directory / "out/evals/questions.jsonl"

    def run(self, *arguments: str) -> Result:
        (self.directory / "config.yml").write_text(yaml.safe_dump(self.config))
        return CliRunner(mix_stderr=False).invoke(
            cli, ["eval", "--config_file", "config.yml", *arguments]
        )

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, (result.exception, result.stderr)
        return json.loads(result.stdout)

    def error(self, *arguments: str) -> KitError:
        result = self.run(*arguments)
        assert isinstance(result.exception, KitError), (result.exception, result.output)
        assert "\n" not in result.exception.message and result.exception.hint
        return result.exception


@pytest.fixture
def project(
    tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Project]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Project(tmp_path, endpoint)
    sys.modules.pop("eval_agent", None)
