"""Forking, pushing, pulling and deleting checkpoints through ART's routes."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Serving

FAKE = Path(__file__).with_name("fake_aws.py")
BUCKET = {"s3_bucket": "bucket", "prefix": "some/where"}


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    """A server whose PATH begins with a fake `aws` that writes to a directory."""
    directory = tmp_path_factory.mktemp("storing")
    program = directory / "bin" / "aws"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    environment = {
        "ART_CACHE": art_cache,
        "FAKE_S3": str(directory / "s3"),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
    }
    with Serving(directory, "tiny-random", **environment) as serving:
        yield serving


def model(name: str, **internal: Any) -> dict[str, Any]:
    wire = {"name": name, "project": "contract", "base_model": "tiny-random"}
    return {**wire, "_internal_config": internal}


def prepare(server: Serving, wire: dict[str, Any]) -> None:
    server.post("/_prepare_backend_for_training", {"model": wire})


def teach(server: Serving, wire: dict[str, Any], reply: str) -> None:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    body = {"model": wire, "trajectories": [{"messages_and_choices": talk}]}
    answer = httpx.post(f"{server.control}/_train_sft", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def steps(server: Serving, wire: dict[str, Any]) -> list[int]:
    url = f"{server.openai}/v1/preview/models/contract~{wire['name']}/checkpoints"
    return [entry["step"] for entry in httpx.get(url, timeout=60).raise_for_status().json()["data"]]


@pytest.fixture(scope="module")
def taught(storing: Serving) -> dict[str, Any]:
    wire = model("taught")
    prepare(storing, wire)
    for reply in ("a", "b"):
        teach(storing, wire, reply)
    return wire


def test_a_fork_continues_from_a_step_of_another_run(
    storing: Serving, taught: dict[str, Any]
) -> None:
    fork = model("fork")
    body = {"model": fork, "from_model": "taught", "not_after_step": 1}
    storing.post("/_experimental_fork_checkpoint", body)
    assert steps(storing, fork) == [0, 1]
    teach(storing, fork, "c")
    assert storing.post("/_get_step", fork) == 2
    again = httpx.post(f"{storing.control}/_experimental_fork_checkpoint", json=body, timeout=60)
    assert again.status_code == 409 and "at step `2`" in again.json()["detail"]


def test_a_fork_from_a_lora_of_another_shape_is_refused(
    storing: Serving, taught: dict[str, Any]
) -> None:
    body = {"model": model("wide", peft_args={"r": 4}), "from_model": "taught"}
    answer = httpx.post(f"{storing.control}/_experimental_fork_checkpoint", json=body, timeout=60)
    assert answer.status_code == 409 and "LoRA" in answer.json()["detail"]


def test_a_run_is_restored_from_s3(storing: Serving, taught: dict[str, Any]) -> None:
    storing.post("/_experimental_push_to_s3", {"model": taught, **BUCKET})
    bucket = storing.state.parent / "s3" / "bucket" / "some" / "where" / "contract" / "models"
    assert (bucket / "taught" / "checkpoints" / "0002" / "manifest.json").is_file()
    assert not list(bucket.rglob("journal*"))
    shutil.copytree(bucket / "taught", bucket / "home")
    whole, newest = model("home"), model("newest")
    shutil.copytree(bucket / "taught", bucket / "newest")
    for wire, only in ((whole, None), (newest, "latest")):
        storing.post("/register", wire)
        body = {"model": wire, **BUCKET, "only_step": only}
        storing.post("/_experimental_pull_from_s3", body)
        prepare(storing, wire)
    assert (steps(storing, whole), steps(storing, newest)) == ([0, 1, 2], [2])
    from_s3 = {"from_s3_bucket": "bucket", "prefix": "some/where"}
    body = {"model": model("from-s3"), "from_model": "taught", **from_s3}
    storing.post("/_experimental_fork_checkpoint", body)
    assert steps(storing, model("from-s3")) == [0, 2]


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("push_to_s3", {"s3_bucket": "no-such-bucket", "only_step": 1}, "only_step"),
        ("pull_from_s3", {"s3_bucket": "no-such-bucket"}, "bucket does not exist"),
        ("pull_from_s3", {"s3_bucket": "bucket", "prefix": "../x"}, "`../x`"),
        ("pull_from_s3", {**BUCKET, "only_step": 99}, "`0099`"),
    ],
)
def test_a_failed_push_or_pull_names_the_cause(
    storing: Serving, taught: dict[str, Any], path: str, settings: Any, message: str
) -> None:
    body = {"model": taught, **settings}
    answer = httpx.post(f"{storing.control}/_experimental_{path}", json=body, timeout=60)
    assert 400 <= answer.status_code < 500 and message in answer.json()["detail"]


def test_deleted_steps_and_models_are_not_served(storing: Serving, taught: dict[str, Any]) -> None:
    old = model("old")
    prepare(storing, old)
    for reply in ("a", "b"):
        teach(storing, old, reply)
    url = f"{storing.openai}/v1/preview/models/contract~old"
    newest = httpx.request("DELETE", f"{url}/checkpoints", json={"steps": [2]}, timeout=60)
    assert newest.status_code == 409
    deleted = httpx.request("DELETE", f"{url}/checkpoints", json={"steps": [1, 7]}, timeout=60)
    assert deleted.json() == {"deleted_count": 1, "not_found_steps": [7]}
    chat = f"{storing.openai}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    statuses = [
        httpx.post(chat, json={**body, "model": name}, timeout=60).status_code
        for name in ("old@0", "old@1", "old@2")
    ]
    assert statuses == [200, 404, 200]
    assert httpx.delete(url, timeout=60).status_code == 200
    assert httpx.get(f"{url}/checkpoints", timeout=60).status_code == 404
    assert not (storing.state / "contract" / "models" / "old").exists()
