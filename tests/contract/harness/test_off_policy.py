"""Sampling ahead on a real server: a blocked run holds no step, and a kill repeats none."""

import json
import signal
import sqlite3
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kit.files import read_lines
from tests.contract.harness.conftest import Project, guide, write_project
from tests.contract.harness.test_resume import EPOCHS, step_of, stop_at
from tests.environments import client_environment
from tests.serving import Serving

PATIENCE = 300  # seconds after which a test that waits has failed
AGENT = '''
import asyncio
import random
from pathlib import Path

METRICS = Path(".tmp/nat/finetuning/output/training_metrics.jsonl")


async def until(name):
    while not Path(name).exists():
        await asyncio.sleep(0.05)


async def answer(example, llm):
    """The first run waits for the file `release`. The others wait for it, late in the test."""
    messages = [{"role": "user", "content": example.question}]
    message = await llm.chat(messages, max_tokens=4)
    if Path("block").exists():
        try:
            with Path("blocked").open("x") as file:
                file.write(example.id)
        except FileExistsError:
            epochs = len(METRICS.read_text().splitlines()) if METRICS.exists() else 0
            if epochs >= int(Path("block").read_text()):
                await until("recorded")
        else:
            await until("release")
            messages += [message, {"role": "user", "content": "And then?"}]
            message = await llm.chat(messages, max_tokens=4)
    return message["content"]


def unique(run):
    """A reward by which a run is recognized on the server."""
    return random.random()
'''


def prepare(project: Any, **settings: Any) -> None:
    rows = [{"id": f"x{n}", "question": f"Question {n}?", "answer": str(n)} for n in range(40)]
    (project.directory / "data/training_data.json").write_text(json.dumps(rows))
    (project.directory / "agent.py").write_text(AGENT)
    project.config["eval"]["evaluators"]["my_reward"]["function"] = "agent:unique"
    project.config["finetuning"] |= {"max_steps_off_policy": 1, "groups_per_step": 1, **settings}


@contextmanager
def running(project: Any, epochs: int) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        project.command("-o", "finetuning.num_epochs", str(epochs)),
        cwd=project.directory,
        env=client_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stderr
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    raise AssertionError("".join(seen))


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def records(project: Any) -> dict[int, list[Any]]:
    """The runs that each epoch used, by its number."""
    files = (project.directory / ".tmp/nat/finetuning/eval").glob("epoch_*.jsonl")
    return {
        int(file.stem.removeprefix("epoch_")): [
            json.loads(line) for line in file.read_text().splitlines()
        ]
        for file in files
    }


def directory_of(server: Any, project: Any) -> Path:
    name = project.config["trainer_adapters"]["art_adapter"]["backend"]["name"]
    return Path(server.state / "harness/models" / name)


def trained(server: Any, project: Any) -> dict[int, list[tuple[str, float, list[int]]]]:
    """Example, reward and sampling steps of the attempts in each step, as the server kept them."""
    found: dict[int, list[tuple[str, float, list[int]]]] = {}
    for file in (directory_of(server, project) / "batches").glob("????.db"):
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
            rows = database.execute(
                "SELECT example, reward, policy_steps FROM attempts JOIN tokens "
                "ON attempt_id = attempts.id WHERE error IS NULL OR error = ''"
            ).fetchall()
        found[int(file.stem)] = [
            (example, reward, [step for _, _, step in json.loads(steps)])
            for example, reward, steps in rows
        ]
    return found


@pytest.mark.parametrize(
    ("max_steps", "released_after", "failure", "pin"),
    [(2, 1, None, False), (2, 1, None, True), (1, 2, "stale", False)],
    ids=["trained later", "pinned", "stale"],
)
def test_a_blocked_run_holds_no_step(
    project: Any, server: Any, max_steps: int, released_after: int, failure: str | None, pin: bool
) -> None:
    prepare(project, max_steps_off_policy=max_steps, pin_runs=pin)
    (project.directory / "block").write_text(str(released_after))
    epochs = 6
    with running(project, epochs) as process:
        read_until(process, f"Completed epoch {released_after}/{epochs}")
        blocked = (project.directory / "blocked").read_text()
        used = [row["id"] for rows in records(project).values() for row in rows]
        assert blocked not in used, "the steps did not wait for it"
        (project.directory / "release").touch()
        waiting = project.output / "sampled_groups.jsonl"

        def ended() -> bool:
            sampled = [group["records"] for group in read_lines(waiting).rows]
            return any(row["id"] == blocked for row in chain(*sampled, *records(project).values()))

        until(ended)
        (project.directory / "recorded").touch()
        read_until(process, f"Completed epoch {epochs}/{epochs}")
        assert process.stderr
        process.stderr.read()
        assert process.wait(PATIENCE) == 0
    found = [
        (epoch, row) for epoch, rows in records(project).items() for row in rows
        if row["id"] == blocked
    ]  # fmt: skip
    assert [row["failure"] for _, row in found] == [failure, failure]
    (epoch,) = {epoch for epoch, _ in found}
    assert epoch > released_after
    metrics = project.read("training_metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(row["policy_age/max"] <= max_steps for row in metrics)
    lost = [row["failures"] for row in metrics]
    assert lost == [({"stale": 2} if failure and n == epoch else {}) for n in range(1, 7)]
    history = (directory_of(server, project) / "history.jsonl").read_text().splitlines()
    shown = {row["step"]: row["data/lost_stale"] for row in map(json.loads, history)
             if row.get("data/lost_stale")}  # fmt: skip
    assert shown == ({epoch: 2} if failure else {}), "on the page, as any lost run"
    steps = trained(server, project)
    by = defaultdict(set)  # a run has two rows if its second call did not go on from its first
    for example, reward, sampled_by in chain(*steps.values()):
        if example == blocked:
            by[reward].update(sampled_by)
    spans = [] if failure else [1, 1] if pin else [1, 2]
    assert sorted(map(len, by.values())) == spans, "the steps that sampled the calls of each run"
    in_step = {step for step, rows in steps.items() for row in rows if row[0] == blocked}
    assert in_step == (set() if failure else {epoch})
    for step, rows in steps.items():
        assert all(step - 1 - oldest <= max_steps for _, _, by in rows for oldest in by)


@pytest.mark.parametrize("line", ["Starting epoch 3", "Submitted"], ids=["sampling", "training"])
def test_a_killed_run_resumes_and_trains_no_trajectory_twice(
    project: Any, server: Any, line: str
) -> None:
    prepare(project, groups_per_step=2)
    assert stop_at(project, line, 1 if "epoch" in line else 3) == -signal.SIGKILL
    project.finetune("--resume", *EPOCHS)
    assert_trained_once(server, project, epochs=5)


def test_a_server_killed_during_a_step_repeats_nothing(tmp_path: Path, art_cache: str) -> None:
    (tmp_path / "server-row").touch()
    environment = {"ART_CACHE": art_cache, "ART_FAULTS": str(tmp_path)}
    with Serving(tmp_path / "server", "tiny-random", **environment) as serving:
        write_project(tmp_path)
        project = Project(tmp_path, guide(serving, "restarted"))
        prepare(project, groups_per_step=2)
        with running(project, 3) as process:
            read_until(process, "Submitted")
            assert serving.process.wait(PATIENCE) == -signal.SIGKILL  # by `ART_FAULTS`, mid-step
            serving.start()
            read_until(process, "Completed epoch 3/3")
            assert process.stderr
            process.stderr.read()
            assert process.wait(PATIENCE) == 0
        assert_trained_once(serving, project, epochs=3)


def assert_trained_once(server: Any, project: Any, epochs: int) -> None:
    metrics = project.read("training_metrics.jsonl")
    numbers = list(range(1, epochs + 1))
    assert [(row["epoch"], row["step"]) for row in metrics] == [(n, n) for n in numbers]
    assert step_of(server, project) == epochs
    steps = trained(server, project)
    assert sorted(steps) == numbers and all(len(rows) == 4 for rows in steps.values())
    rewards = [reward for rows in steps.values() for _, reward, _ in rows]
    assert len(set(rewards)) == len(rewards)
    used = [row["reward"] for rows in records(project).values() for row in rows]
    assert sorted(used) == pytest.approx(sorted(rewards)), "every run of the epochs is trained"
