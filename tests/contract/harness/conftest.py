"""A project with an agent, a reward and the guide's YAML, set up for the real server."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.environments import client_environment

AGENT = '''
import asyncio


async def answer(example, llm):
    message = await llm.chat([{"role": "user", "content": example.question}], max_tokens=6)
    return message["content"]


def length(run):
    """A reward that differs between samples."""
    text = run.output or ""
    return {"reward": sum(map(ord, text)) % 97 / 97, "characters": len(text)}
'''


def guide(server: Any, name: str) -> dict[str, Any]:
    """Return the guide's "Basic Configuration", with the missing parts filled in."""
    return {
        "llms": {
            "training_llm": {
                "_type": "openai",
                "model_name": "tiny-random",
                "base_url": f"{server.openai}/v1",
                "api_key": "default",
                "temperature": 1.0,
            }
        },
        "workflow": {"_type": "python", "function": "agent:answer", "llm": "training_llm"},
        "eval": {
            "general": {
                "max_concurrency": 16,
                "output_dir": ".tmp/nat/finetuning/eval",
                "dataset": {"_type": "json", "file_path": "data/training_data.json"},
            },
            "evaluators": {"my_reward": {"_type": "python", "function": "agent:length"}},
        },
        "trajectory_builders": {
            "art_builder": {"_type": "openpipe_art_traj_builder", "num_generations": 2}
        },
        "trainer_adapters": {
            "art_adapter": {
                "_type": "openpipe_art_trainer_adapter",
                "backend": {
                    "ip": "127.0.0.1",
                    "port": urlsplit(server.control).port,
                    "name": name,
                    "project": "harness",
                    "base_model": "tiny-random",
                    "api_key": "default",
                },
                "training": {"learning_rate": 1e-6},
            }
        },
        "trainers": {"art_trainer": {"_type": "openpipe_art_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "art_trainer",
            "trajectory_builder": "art_builder",
            "trainer_adapter": "art_adapter",
            "reward_function": {"name": "my_reward"},
            "num_epochs": 20,
            "output_dir": ".tmp/nat/finetuning/output",
        },
    }


@dataclass
class Project:
    """A user's directory, in which `trainer finetune` runs."""

    directory: Path
    config: dict[str, Any]
    python: str = sys.executable

    @property
    def output(self) -> Path:
        return self.directory / ".tmp/nat/finetuning/output"

    def write(self) -> None:
        (self.directory / "config.yml").write_text(yaml.safe_dump(self.config, sort_keys=False))

    def command(self, *arguments: str) -> list[str]:
        self.write()
        return [self.python, "-m", "trainer", "finetune", "--config_file=config.yml", *arguments]

    def finetune(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env=client_environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result

    def read(self, name: str) -> Any:
        text = (self.output / name).read_text()
        if name.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)


def write_project(directory: Path) -> None:
    """Write the agent, four training questions and two validation questions."""
    (directory / "agent.py").write_text(AGENT)
    (directory / "data").mkdir()
    rows = [{"id": n, "question": f"Question {n}?", "answer": str(n)} for n in range(6)]
    (directory / "data/training_data.json").write_text(json.dumps(rows[:4]))
    (directory / "data/val.json").write_text(json.dumps(rows[4:]))


@pytest.fixture
def project(server: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Project:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:80]
    write_project(tmp_path)
    return Project(tmp_path, guide(server, name))
