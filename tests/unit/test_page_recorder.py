"""What the server keeps of a step: from any client, within its bound, whatever the disk does."""

import asyncio
import logging
import os
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ServerConfig
from trainer.page import batches, groups
from trainer.page.reader import Run
from trainer.server.attempts import groups_of, logged_group
from trainer.server.journal import JournaledRequest
from trainer.server.learner_tokens import LearnerTokens, read
from trainer.server.recorder import WAITING, Recorder, prune


class Words:
    """A tokenizer that needs no model."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


def request(step: int = 1, *, text: str = "hello", **config: Any) -> JournaledRequest:
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    member = {"messages_and_choices": [{"role": "user", "content": "hi"}, choice], "reward": 1.0}
    other = {**member, "reward": 0.0}
    wires = [{"trajectories": [member, other]}]
    return JournaledRequest(step, "", "tiny-random", {}, wires, config)


def recorder(state: Path, limit: str = "2GB") -> Recorder:
    config = ServerConfig(state_dir=str(state), keep_rollouts=limit)
    return Recorder(config, lambda: Words())  # type: ignore[arg-type, return-value]


def keep(state: Path, *steps: JournaledRequest, limit: str = "2GB") -> Run:
    directory = state / "p" / "models" / "n"
    directory.mkdir(parents=True, exist_ok=True)
    it = recorder(state, limit)
    for step in steps:
        it.step_served(directory, step)
    asyncio.run(it.stop())
    return Run("p", "n", directory)


def test_a_step_without_a_ledger_or_the_learners_file_is_kept_by_its_texts(tmp_path: Path) -> None:
    run = keep(tmp_path, request())
    (group,) = groups.step(run, 1)["groups"]
    assert group["n"] == 2 and group["mean"] == 0.5
    attempt = groups.attempt(run, 1, 1)
    assert attempt["conversations"][0]["messages"][1]["content"] == "hello"
    assert groups.tokens(run, 1, 1)["total"] == 0


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no archive", b"\0" * 1000])
def test_a_broken_file_of_the_learner_costs_only_its_tokens(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p" / "models" / "n" / "batches" / ".0001.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    run = keep(tmp_path, request())
    assert groups.step(run, 1)["groups"] and not path.exists()


def test_the_tokens_of_another_step_are_not_taken(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "x.npz", step=np.array(4))
    assert read(tmp_path / "x.npz", 5) is None


def test_nothing_is_kept_with_a_bound_of_zero(tmp_path: Path) -> None:
    run = keep(tmp_path, request(), limit="0")
    assert not (run.directory / "batches").exists()


def test_the_oldest_steps_go_first_and_the_total_stays_within_the_bound(tmp_path: Path) -> None:
    noise = [os.urandom(30_000).hex() for _ in range(4)]
    steps = [request(step + 1, text=text) for step, text in enumerate(noise)]
    run = keep(tmp_path, *steps, limit="200KB")
    sizes = [path.stat().st_size for path in (run.directory / "batches").glob("*.db")]
    assert 0 < sum(sizes) <= 200_000
    kept = run.kept()["train"]
    assert kept and kept == list(range(5 - len(kept), 5)), "the newest are kept"
    assert len(run.groups.of("train")) == 4, "the means of every group outlive the files"


def test_the_bound_holds_for_all_runs_together(tmp_path: Path) -> None:
    paths = []
    for number, name in enumerate(("a", "b", "c")):
        path = tmp_path / "p" / "models" / name / "batches" / "0001.db"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (number + 1, number + 1))
        paths.append(path)
    prune(tmp_path, 200)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_disk_that_refuses_is_a_warning_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "p" / "models" / "n"
    directory.mkdir(parents=True)
    (directory / "batches").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        keep(tmp_path, request(3))
    assert "step 3 of n is not kept for the page" in caplog.text
    (directory / "batches").unlink()
    assert keep(tmp_path, request(4)).kept() == {"train": [4]}


ODD = [1.5, 10**400, "x", {"a": [1]}, [[1]], [None], True]


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(
    "name",
    ["additional_histories", "messages_and_choices", "logs", "metadata", "metrics", "finish"],
)
def test_an_odd_field_of_a_trajectory_does_not_lose_its_step(
    tmp_path: Path, name: str, value: Any
) -> None:
    logged = request()
    member = logged.groups[0]["trajectories"][0]
    (member["messages_and_choices"][1] if name == "finish" else member)[
        "finish_reason" if name == "finish" else name
    ] = value
    logged.groups[0]["exceptions"] = value
    assert keep(tmp_path, logged).kept() == {"train": [1]}
    assert logged_group({"trajectories": value}) is not None


def test_a_client_that_logs_faster_than_the_disk_writes_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it, free = recorder(tmp_path), threading.Event()
    monkeypatch.setattr(it, "_keep_logged", lambda *_: free.wait(60))
    for _ in range(WAITING + 20):
        it.logged(tmp_path / "n", 1, [], "val")
    assert caplog.text.count("the disk is too slow") == 1
    free.set()
    asyncio.run(it.written())
    it.logged(tmp_path / "n", 2, [], "val")
    assert "19 more were not kept" in caplog.text
    asyncio.run(it.stop())


def test_a_write_that_fails_half_way_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = batches.Group([batches.Attempt(0, 1.0, [{"messages": [object()]}])])
    path = batches.path_of(tmp_path, 1)
    with pytest.raises(TypeError):
        batches.write(path, {"step": 1}, [group], {}, split="train")
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    "trajectory",
    [
        {},
        {"messages_and_choices": None, "metrics": None, "metadata": None, "logs": None},
        {"messages_and_choices": [{"role": "user", "content": None}], "reward": float("nan")},
        {"messages_and_choices": [{"message": None, "finish_reason": None}], "metrics": [1]},
        {"messages_and_choices": [{"role": "user", "content": [{"type": "text", "text": "a"}, 5]}]},
        {"messages_and_choices": [{"finish_reason": "x", "message": {}, "logprobs": [3]}]},
        {"metrics": {"a": 10**400, "b": "c", "d": True}, "metadata": {"example_id": ""}},
    ],
)
def test_odd_trajectories_are_kept(tmp_path: Path, trajectory: Any) -> None:
    wire = [{"trajectories": [trajectory], "exceptions": ["text", {}]}]
    run = keep(tmp_path, JournaledRequest(1, "", "", {}, wire, {}))
    assert groups.step(run, 1)["groups"][0]["n"] == 3
    assert len(groups.group(run, 1, 1)["attempts"]) == 3


def test_turns_of_different_steps_keep_their_policy(tmp_path: Path) -> None:
    def choice(step: int, ids: list[int]) -> Any:
        tokens = [{"token": f"token_id:{id}", "logprob": 0.0} for id in ids]
        message = {"role": "assistant", "content": "x"}
        return {"message": message, "logprobs": {"content": tokens}, "policy_step": step}

    member = {"messages_and_choices": [choice(3, [1, 2]), choice(4, [5])], "reward": 1.0}
    group = logged_group({"trajectories": [member]})
    first, second = group.attempts[0].sequences
    assert first.policy_steps == [(0, 2, 3)] and second.policy_steps == [(0, 1, 4)]
    assert first.logprobs.tolist() == [0.0, 0.0]

    sequence = batches.TokenSequence(
        array("i", [9, 1, 2, 8, 5]), b"\0\1\1\0\1", array("f", [0] * 5)
    )
    sequence.advantage = 1.0

    tokens = LearnerTokens({(0, 0): [sequence]})
    (built,) = groups_of(JournaledRequest(1, "", "", {}, [{"trajectories": [member]}], {}), tokens)
    assert built.trainable and sequence.policy_steps == [(1, 3, 3), (4, 5, 4)]


async def test_waits_for_the_steps_that_are_still_written(tmp_path: Path) -> None:
    directory = tmp_path / "p" / "models" / "n"
    it = recorder(tmp_path)
    for step in range(1, 9):
        it.step_served(directory, request(step))
    await it.written()
    assert batches.kept_steps(directory) == {batches.TRAIN: list(range(1, 9))}
    await it.stop()
    await it.written()  # a server that stops waits for nothing
