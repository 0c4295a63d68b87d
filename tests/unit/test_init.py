"""`launcher init`: a project that trains at once, and nothing of the user's overwritten."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from launcher.init import AGENTS, HEADING
from launcher.testing import FakeProvider
from trainer.harness.config_file import load_config
from trainer.harness.dataset import load_examples
from trainer.harness.workflow_config import VerifiersConfig

Invoke = Callable[..., Result]
FAKE = FakeProvider()


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("agent", AGENTS)
def test_what_it_writes_is_a_config_that_loads(
    invoke: Invoke, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("init", "demo", "--yes", "--agent", agent, provider=FAKE).exit_code == 0
    monkeypatch.chdir("demo")
    config = load_config(Path("finetune.yaml"))
    backend = config.trainer_adapters["backend"].backend
    assert config.llms["policy"].model_name == backend.name == "demo"
    assert f"BASE_MODEL={backend.base_model}\n" in Path(".env").read_text()
    if not isinstance(config.workflow, VerifiersConfig):
        assert config.eval.general.dataset is not None
        assert len(load_examples(config.eval.general.dataset)) == 10
    assert all(package in Path("pyproject.toml").read_text() for package in AGENTS[agent])
    assert Path(".env").stat().st_mode & 0o077 == 0
    assert "shop-agent" not in Path("finetune.yaml").read_text() + Path("README.md").read_text()


def test_it_prints_the_next_commands_and_json(invoke: Invoke) -> None:
    result = invoke("init", "demo", "--yes", "--json", provider=FAKE)
    printed = json.loads(result.stdout)
    assert (printed["name"], printed["agent"], printed["left"]) == ("demo", "python", [])
    assert "shop_agent/agent.py" in printed["written"]
    assert result.stderr.endswith(
        "Next: `cd demo`\nNext: `launcher up --local`, then `trainer finetune finetune.yaml`\n"
    )


def test_a_second_init_changes_nothing(invoke: Invoke) -> None:
    invoke("init", "demo", "--yes", provider=FAKE)
    before = contents(Path("demo"))
    result = invoke("init", "demo", "--yes", provider=FAKE)
    assert result.exit_code == 0 and contents(Path("demo")) == before
    assert "Wrote" not in result.stderr and "Left alone" not in result.stderr


@pytest.mark.parametrize("missing", ["finetune.yaml", "shop_agent/data/train.jsonl", "README.md"])
def test_a_half_made_init_is_finished_by_running_it_again(invoke: Invoke, missing: str) -> None:
    invoke("init", "demo", "--yes", provider=FAKE)
    whole = contents(Path("demo"))
    Path("demo", missing).unlink()
    assert f"Wrote: {missing}" in invoke("init", "demo", "--yes", provider=FAKE).stderr
    assert contents(Path("demo")) == whole


def test_nothing_of_an_existing_project_is_overwritten(invoke: Invoke) -> None:
    project = Path("mine")
    (project / "shop_agent").mkdir(parents=True)
    own = {
        "pyproject.toml": "[project]\nname = 'mine'\n",
        "finetune.yaml": "mine: true\n",
        "shop_agent/agent.py": "MINE = True\n",
        ".env": "HF_TOKEN=secret\n",
        "ReadMe.md": "# Mine",
        ".gitignore": ".env\n/.art\n*.log",
    }
    for path, text in own.items():
        (project / path).write_text(text)
    result = invoke("init", str(project), "--yes", "--agent", "langgraph", provider=FAKE)
    assert result.exit_code == 0
    for path in ("pyproject.toml", "finetune.yaml", "shop_agent/agent.py", ".env"):
        assert (project / path).read_text() == own[path]
        assert f"Left alone, because it has another content: {path}" in result.stderr
    assert "Add to your project's dependencies: langgraph" in result.stderr
    assert "Add `BASE_MODEL=HuggingFaceTB/SmolLM2-135M-Instruct` to your `.env`" in result.stderr
    readme = (project / "ReadMe.md").read_text()
    assert readme.startswith("# Mine\n") and readme.count(HEADING) == 1
    assert not (project / "README.md").exists()
    ignored = (project / ".gitignore").read_text().splitlines()
    assert ignored[:3] == [".env", "/.art", "*.log"]
    assert ignored.count(".env") == 1 and ".art/" not in ignored and "checkpoints/" in ignored
    before = contents(project)
    invoke("init", str(project), "--yes", "--agent", "langgraph", provider=FAKE)
    assert contents(project) == before


def test_a_project_with_requirements_gets_no_second_list_of_dependencies(invoke: Invoke) -> None:
    Path("requirements.txt").write_text("openai\n")
    result = invoke("init", "--yes", "--name", "mine", "--agent", "langgraph", provider=FAKE)
    assert not Path("pyproject.toml").exists()
    assert "Add to your project's dependencies: langgraph" in result.stderr


def test_without_yes_it_lists_the_files_and_asks(invoke: Invoke) -> None:
    result = invoke("init", "demo", provider=FAKE)  # stdin is empty
    assert result.exit_code == 1 and not Path("demo").exists()
    assert "Agent to start from" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--agent", "langraph"], "There is no agent `langraph`"),
        (["task.yaml"], "`task.yaml` is a file"),
        (["task.yaml/demo"], "is a file"),
        (["my agent"], "`my agent` cannot name a run"),
        (["demo", "--name", "../up"], "`../up` cannot name a run"),
        (["demo", "--name", "-x"], "`-x` cannot name a run"),
    ],
)
def test_what_cannot_be_a_project_is_refused(
    invoke: Invoke, arguments: list[str], message: str
) -> None:
    result = invoke("init", *arguments, "--yes", provider=FAKE)
    assert result.exit_code == 1 and message in result.stderr and "hint" in result.stderr
    assert os.listdir() == ["task.yaml"]


def test_a_directory_that_cannot_be_written_is_named(invoke: Invoke) -> None:
    Path("demo").mkdir()
    Path("demo/shop_agent").write_text("a file of the user")
    result = invoke("init", "demo", "--yes", provider=FAKE)
    assert result.exit_code == 1 and "shop_agent` is a file" in result.stderr
