"""Sampling and training at the same time: chats go on, and no kill loses or repeats a step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.patient import (
    BASE,
    MODEL,
    PATIENCE_S,
    POINTS,
    Refused,
    ask_for_step,
    hashes,
    is_pending,
    prepare,
    restart_if_dead,
    train,
)
from tests.processes import child
from tests.serving import Serving

# The points that a step reaches whether or not anybody samples.
STEP_POINTS = [point for point in POINTS if point != "engine-sampling"]


@contextmanager
def learner_stopped(serving: Serving) -> Iterator[None]:
    """Keep the learner in the middle of whatever it does."""
    learner = child(serving.process.pid, "trainer.learner")
    os.kill(learner, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # a server that dies takes it along
            os.kill(learner, signal.SIGCONT)


def chat(serving: Serving) -> dict[str, Any]:
    question = {"model": "run", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    more = {"n": 4, "seed": 5, "logprobs": True}
    answer = httpx.post(
        f"{serving.openai}/v1/chat/completions", json={**question, **more}, timeout=PATIENCE_S
    )
    return dict(answer.raise_for_status().json())


def step_of(serving: Serving) -> int:
    return int(serving.post("/_get_step", MODEL))


def send(serving: Serving, step: int) -> threading.Thread:
    """Send a train request, and return once it is in the journal or the server is dead."""

    def request() -> None:
        with suppress(httpx.TransportError):  # `finish` sends it again
            ask_for_step(serving, step)

    thread = threading.Thread(target=request)
    thread.start()
    wait_for(lambda: is_pending(serving, step) or serving.process.poll() is not None)
    return thread


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finish(serving: Serving, step: int) -> None:
    """Send a request again until its step is trained, unless its answer was delivered."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if prepare(serving) < step or is_pending(serving, step):
                ask_for_step(serving, step)
            return
        except (httpx.TransportError, Refused):
            restart_if_dead(serving)
    raise AssertionError(f"step {step} was not trained in {PATIENCE_S} s")


def test_a_chat_is_answered_while_a_step_trains(tmp_path: Path) -> None:
    with Serving(tmp_path, BASE) as serving:
        train(serving, 1)
        with learner_stopped(serving):
            training = send(serving, 2)
            assert chat(serving)["policy_step"] == 1
            assert step_of(serving) == 1 and is_pending(serving, 2)
        training.join(PATIENCE_S)
        assert chat(serving)["policy_step"] == step_of(serving) == 2


def test_a_body_that_is_to_be_trained_from_another_step_is_another_step(tmp_path: Path) -> None:
    with Serving(tmp_path, BASE) as serving, ThreadPoolExecutor() as clients:
        prepare(serving)
        with learner_stopped(serving):
            first = clients.submit(ask_for_step, serving, 1, parent=0)
            wait_for(lambda: is_pending(serving, 1))
            again = clients.submit(ask_for_step, serving, 1, parent=0)
            second = clients.submit(ask_for_step, serving, 1, parent=1)
            wait_for(lambda: is_pending(serving, 2))
            with pytest.raises(Refused, match="to be trained from step 7"):
                ask_for_step(serving, 1, parent=7)
        assert first.result() == again.result() != second.result()
        assert step_of(serving) == 2


def test_a_client_that_waits_for_each_step_sees_the_same_with_and_without_turns(
    tmp_path: Path,
) -> None:
    seen: list[Any] = []
    for name, flags in (("shared", ()), ("turns", ("--take-turns",))):
        with Serving(tmp_path / name, BASE, *flags) as serving:
            rows, choices = [], []
            for step in (1, 2, 3):
                rows.append(train(serving, step))
                for choice in chat(serving)["choices"]:
                    content = choice["logprobs"]["content"]
                    sampled = [(token["token"], token["logprob"]) for token in content]
                    choices.append((choice["finish_reason"], sampled))
            seen.append((rows, choices, hashes(serving)))
    assert seen[0] == seen[1]


@pytest.mark.timeout(1800)
def test_no_kill_loses_or_repeats_one_of_two_steps_under_way(tmp_path: Path, rounds: int) -> None:
    points = STEP_POINTS if rounds > 1 else STEP_POINTS[::4]
    with Serving(tmp_path / "calm", BASE) as calm:
        for step in range(1, 2 * len(points) + 1):
            train(calm, step)
        expected = hashes(calm)
    faults = tmp_path / "faults"
    faults.mkdir()
    with Serving(tmp_path / "stormy", BASE, ART_FAULTS=str(faults)) as stormy:
        for number, point in enumerate(points):
            prepare(stormy)
            first, second = 2 * number + 1, 2 * number + 2
            with learner_stopped(stormy):
                sent = [send(stormy, first)]
                if point == "server-journaled":
                    (faults / point).touch()  # a request reaches it at once
                sent.append(send(stormy, second))
                if point != "server-journaled":
                    (faults / point).touch()
            for thread in sent:
                thread.join(PATIENCE_S)
            for step in (first, second):
                finish(stormy, step)
            assert not (faults / point).exists(), f"`{point}` was never reached"
            assert chat(stormy)["policy_step"] == step_of(stormy) == second, point
        assert hashes(stormy) == expected
    assert len(expected) == 2 * len(points) + 1
