"""What the README tells a newcomer to type works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import client_environment, python_of
from tests.serving import Serving

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_quickstart_trains_as_it_is_printed(server: Serving, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(import asyncio\n.*?)```", README, re.DOTALL)
    assert "http://127.0.0.1:7999" in script
    (tmp_path / "train.py").write_text(script.replace("http://127.0.0.1:7999", server.control))
    result = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    steps = [line.split()[0] for line in result.stdout.splitlines()]
    assert steps == ["1", "2", "3", "4", "5"]


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and all((Path(__file__).parents[2] / link).exists() for link in links)


TRAIN = """

import asyncio
import sys

import httpx
from art import TrainableModel, TrajectoryGroup
from trainer.client import ArtBackend


async def main(control, agent):
    backend = ArtBackend(control)
    model = TrainableModel(name=agent.__name__, project="readme", base_model="tiny-random")
    await model.register(backend)
    group = TrajectoryGroup([await attempt(agent, model) for _ in range(2)])
    for number, one in enumerate(group.trajectories):
        one.reward = float(number)  # random answers may have the same number of `e`
    result = await backend.train(model, [group], learning_rate=1e-4)
    sampled = 0
    for one in group.trajectories:
        server = model.inference_base_url.removesuffix("/v1")
        read = httpx.get(f"{server}/rollouts/{one.metadata['rollout']}").json()
        sampled += sum(len(choice["token_ids"]) for choice in read["choices"])
    print(result.step, int(result.metrics["data/step_trainer_tokens"]), sampled)
    await backend.close()


asyncio.run(main(sys.argv[1], globals()[sys.argv[2]]))
"""


@pytest.mark.parametrize("framework", ["openai_agents", "langgraph", "pydantic_ai"])
def test_the_rollout_of_a_framework_trains_as_it_is_printed(
    server: Serving, framework: str, tmp_path: Path
) -> None:
    (code,) = re.findall(
        r"```python\n(from trainer.client import rollout\n.*?)```", README, re.DOTALL
    )
    assert code in (Path(__file__).parents[2] / "docs" / "your-agent.md").read_text()
    (tmp_path / "train.py").write_text(code + TRAIN)
    result = subprocess.run(
        [str(python_of("rollouts")), "train.py", server.control, framework],
        cwd=tmp_path,
        env=client_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    step, trained, sampled = map(int, result.stdout.split()[-3:])
    assert step == 1 and trained == sampled > 0
