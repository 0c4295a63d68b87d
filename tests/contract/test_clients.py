"""The real client packages, each in its own environment, against one running server.

Each trains at least two steps and sees the weights change.
"""

import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.environments import python_of, run_client
from tests.serving import Serving

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module", params=["server", "vllm_server"], ids=["embedded", "vllm"])
def serving(request: pytest.FixtureRequest) -> Any:
    """Every test of this file runs against both engines, first the one, then the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def agents_python() -> Path:
    return python_of("agents")


@pytest.fixture(scope="session")
def newest_python() -> Path:
    """The newest openpipe-art, which needs Python 3.12."""
    return python_of("art-0.5.23", version="3.12")


@pytest.fixture(scope="module")
def newest_told(
    serving: Serving, newest_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What both backends of the newest openpipe-art report, in one process: it starts slowly."""
    directory = tmp_path_factory.mktemp("newest")
    return run_client(
        newest_python, "art_newest.py", serving.control, serving.openai, cwd=directory
    )


def all_differ(fingerprints: list[list[float]]) -> bool:
    """Whether each step changed the weights; vLLM's rounding alone moves a logprob by 1e-6."""
    return all(
        max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-4
        for before, after in itertools.pairwise(fingerprints)
    )


def steps_on_disk(serving: Serving, name: str) -> list[str]:
    checkpoints = serving.state / "contract" / "models" / name / "checkpoints"
    return sorted(path.name for path in checkpoints.iterdir())


def rank(serving: Serving, name: str) -> int:
    """The rank of a run's newest LoRA, in its config and its weights."""
    checkpoints = serving.state / "contract" / "models" / name / "checkpoints"
    newest = max(path for path in checkpoints.iterdir() if path.name.isdigit())
    config = json.loads((newest / "adapter_config.json").read_text())
    return int(config["r"])


def history(serving: Serving, name: str) -> list[dict[str, Any]]:
    path = serving.state / "contract" / "models" / name / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_page(serving: Serving, name: str, sampled: list[list[list[int]]]) -> None:
    """The page has every step of a run: its group, attempts, and the tokens that were sampled."""
    run = f"{serving.control}/api/runs/contract/{name}"

    def get(path: str) -> Any:
        for _ in range(300):  # a step is recorded in a thread, after it is served
            answer = httpx.get(f"{run}/{path}", timeout=60)
            if answer.status_code == 200:
                return answer.json()
            time.sleep(0.1)
        raise AssertionError(answer.text)

    for step, of_step in enumerate(sampled, 1):
        (group,) = get(f"steps/{step}")["groups"]
        assert group["trainable"] and group["n"] == len(of_step)
        shown = []
        for attempt in get(f"steps/{step}/groups/{group['id']}")["attempts"]:
            assert attempt["conversations"][0]["messages"][-1]["trained"]
            tokens = get(f"attempts/{step}/{attempt['id']}/tokens")
            chosen = [at for at, mask in enumerate(tokens["mask"]) if mask]
            shown.append([tokens["id"][at] for at in chosen])
            assert {tokens["advantage"][at] for at in chosen} == {attempt["advantage"]} != {None}
            assert {tokens["policy_step"][at] for at in chosen} == {step - 1}
            assert None not in [tokens[key][at] for key in ("logprob", "learner") for at in chosen]
        assert sorted(shown) == sorted(of_step)


def test_the_backend_of_openpipe_art_0_5_0_trains_logs_deletes_and_forks(
    serving: Serving, tmp_path: Path
) -> None:
    python = python_of("art-0.5.0")
    told = run_client(python, "art_generation_1.py", serving.control, serving.openai, cwd=tmp_path)
    assert told["steps"] == [0, 1, 2, 3]
    assert len(told["fingerprints"]) == 4 and all_differ(told["fingerprints"])
    assert told["fork"] == pytest.approx(told["fingerprints"][-1], abs=1e-4)
    # The newest, and the best by val/reward: all are equal, and the later of equals wins.
    assert steps_on_disk(serving, "generation-1") == ["0002", "0003"]
    assert steps_on_disk(serving, "generation-1-fork") == ["0000", "0003"]
    logged = [line for line in history(serving, "generation-1") if "val/reward" in line]
    assert [line["step"] for line in logged] == [0, 1, 2]
    assert all(line["val/reward"] == 0.5 == line["val/reward_std_dev"] for line in logged)
    assert all(line["val/exception_rate"] == 0 and "val/length" in line for line in logged)
    stored = serving.state / "contract" / "models" / "generation-1" / "trajectories" / "val"
    assert sorted(path.name for path in stored.iterdir()) == [
        "0000.jsonl",
        "0001.jsonl",
        "0002.jsonl",
    ]
    group = json.loads((stored / "0001.jsonl").read_text())
    assert sorted(trajectory["reward"] for trajectory in group["trajectories"]) == [0, 0, 1, 1]
    check_page(serving, "generation-1", told["sampled"])


def test_the_unmodified_serverless_backend_of_0_5_18_trains(
    serving: Serving, agents_python: Path, tmp_path: Path
) -> None:
    told = run_client(agents_python, "art_serverless.py", serving.openai, cwd=tmp_path)
    assert told["steps"] == [0, 1, 2, 3]
    assert len(told["fingerprints"]) == 4 and all_differ(told["fingerprints"])
    assert told["metrics"]["loss/grad_norm"] > 0
    assert told["metrics"]["data/retokenized"] == 0
    assert steps_on_disk(serving, "serverless") == ["0003"]
    assert "learning_rate" in told["refused"]
    check_page(serving, "serverless", told["sampled"])


def test_our_backend_trains_openpipe_art_0_5_18_without_torch(
    serving: Serving, agents_python: Path, tmp_path: Path
) -> None:
    told = run_client(
        agents_python, "art_backend.py", serving.control, serving.openai, cwd=tmp_path
    )
    assert told["steps"] == [0, 1, 2, 3]
    # Two supervised steps follow, whose loss falls.
    assert told["names"] == [f"backend@{step}" for step in (0, 1, 2, 3, 5)]
    assert told["losses"] == sorted(told["losses"], reverse=True) and len(told["losses"]) == 3
    assert len(told["fingerprints"]) == 4 and all_differ(told["fingerprints"])
    assert (
        "0005" in steps_on_disk(serving, "backend") and len(steps_on_disk(serving, "backend")) < 6
    )
    assert set(told["refused"]) == {"colour", "learning_rate", "loss_fn"}
    assert all(f"`{name}`" in said or name in said for name, said in told["refused"].items())


def test_plain_openai_and_json_train_too(
    serving: Serving, agents_python: Path, tmp_path: Path
) -> None:
    told = run_client(
        agents_python, "plain_openai.py", serving.control, serving.openai, cwd=tmp_path
    )
    assert told["steps"] == [0, 1, 2]
    assert len(told["fingerprints"]) == 3 and all_differ(told["fingerprints"])
    assert {"openai", "openai@0", "openai@1", "openai@2"} <= set(told["names"])
    check_page(serving, "openai", told["sampled"])


def test_the_unmodified_serverless_backend_of_0_5_23_trains_and_names_its_policy(
    newest_told: Any, serving: Serving
) -> None:
    told = newest_told["serverless"]
    assert told["steps"] == [1, 2, 3] and told["other"] == 0
    assert len(told["fingerprints"]) == 4 and all_differ(told["fingerprints"])
    assert told["metrics"]["data/retokenized"] == 0
    assert "loss/kl_policy_ref" in told["metrics"]
    assert told["leased"].endswith("/contract/newest-serverless:step1")
    prompt, completion = told["tokens"]
    [span], [prompt_span] = told["spans"], told["prompt_spans"]
    assert (span["start_token"], span["end_token"]) == (0, completion)
    assert (prompt_span["start_token"], prompt_span["end_token"]) == (1, prompt)
    assert span["policy_version"] == span["update_seq"] == 3 == prompt_span["policy_version"]
    assert span["generation_id"] == "newest-serverless@3"
    assert rank(serving, "newest-serverless") == 8
    assert steps_on_disk(serving, "newest-serverless-again") == ["0000"]


def test_our_backend_trains_openpipe_art_0_5_23_with_the_rank_it_asks_for(
    newest_told: Any, serving: Serving
) -> None:
    told = newest_told["backend"]
    assert told["steps"] == [1, 2, 3] and told["last"] == "newest-backend@5"
    assert len(told["fingerprints"]) == 4 and all_differ(told["fingerprints"])
    name, leased = told["leased"]  # the step stayed until its lease ended
    assert name == "newest-backend@1"
    assert leased == pytest.approx(told["fingerprints"][1], abs=1e-4)
    assert steps_on_disk(serving, "newest-backend") == ["0003", "0004", "0005"]
    assert rank(serving, "newest-backend") == 4
    refused = told["refused"]
    for wanted in ("colour", "loss_fn", "kl_penalty_step_lag", "modules_to_save"):
        assert wanted in refused[wanted]
    assert "no checkpoint of step `1`" in refused["lease"]


def test_trajectories_that_openpipe_art_0_5_23_records_are_trained_token_by_token(
    serving: Serving, newest_python: Path, tmp_path: Path
) -> None:
    told = run_client(
        newest_python, "art_captured.py", serving.control, serving.openai, cwd=tmp_path
    )
    assert told["recorded"] == {
        "chat": {"chat_completions": 2},
        "stream": {"chat_completions": 1},
        "responses": {"responses": 1},
        "completions": {"completions": 1},
        "messages": {"messages": 1},
    }
    assert all(sampled == trained > 0 for sampled, trained in told["tokens"].values())
    assert len(told["fingerprints"]) == 6 and all_differ(told["fingerprints"])
    stranger, base = told["refused"]
    assert "did not sample" in stranger and "`the base model`" in base


def check_overlap(serving: Serving, run: str, found: Any) -> None:
    """Sampling and training were at work at once, as the client and the server measured it.

    `--log-cli-level=info` shows for which share of the wall time.
    """
    assert found["step"] == 3 and all_differ(found["fingerprints"])
    assert found["completed"] == [0, 1, 2, 3]
    # Steps of a tiny model are short: whether one lasts for a whole chat is luck on a busy machine.
    assert found["both_share"] > 0
    overlap = sum(row.get("time/overlap_s", 0) for row in history(serving, run))
    assert overlap > 0
    shares = found["both_share"], overlap / found["wall_s"]
    logger.info("%s sampled and trained at once: %.0f%%, by the server %.0f%% of %.1f s; %s chats "
                "were answered within a step", run, *(100 * share for share in shares),
                found["wall_s"], found["answered_during_steps"])  # fmt: skip


def test_the_pipeline_trainer_of_0_5_23_trains_and_evaluates_on_both_backends(
    serving: Serving, newest_python: Path, tmp_path: Path
) -> None:
    told = run_client(
        *(newest_python, "art_pipeline.py", serving.control, serving.openai),
        cwd=tmp_path,
        timeout=800,  # torch and transformers are compiled at the first start
    )
    for backend, prefix in (("serverless", "wandb-artifact:///"), ("backend", "pipeline-backend@")):
        found = told[backend]
        check_overlap(serving, f"pipeline-{backend}", found)
        for step, name in found["evaluated"].items():
            assert name.startswith(prefix) and name.endswith(step)
    assert rank(serving, "pipeline-backend") == 2


def test_the_pipeline_trainer_of_0_5_18_samples_while_our_backend_trains(
    serving: Serving, tmp_path: Path
) -> None:
    told = run_client(
        *(python_of("art-0.5.18", version="3.12"), "art_pipeline.py"),
        *(serving.control, serving.openai),
        cwd=tmp_path,
    )
    check_overlap(serving, "pipeline-0-5-18", told["backend"])
    # Its own `ServerlessBackend` is older than its `PipelineTrainer`, whatever the server does.
    assert "unexpected keyword argument 'loss_fn'" in told["refused"]
