"""Many chats beside training, and many models on one server."""

import asyncio
import os
import time
from pathlib import Path

import httpx

from tests.faults.load import load, window
from tests.faults.patient import BASE, prepare, sample, train
from tests.serving import Serving

CHATS, MANY_CHATS = 64, 500  # in the suite, and with `--rounds`
MODELS = 20
GROWTH_MIB = 200


def test_many_chats_beside_training_are_answered_or_told_to_wait(
    tmp_path: Path, rounds: int
) -> None:
    with Serving(tmp_path, BASE) as serving:
        train(serving, 1)
        chats = CHATS if rounds == 1 else MANY_CHATS
        found = asyncio.run(load(serving, chats, 10 * rounds))
        assert set(found["answers"]) <= {"200", "429"}, found["answers"]
        assert found["answers"]["200"] >= chats / 2 and found["steps"] >= 1
        for name in ("server", "engine", "learner"):
            first, last = window(found["memory"], name)
            print(f"{name}: {first:.0f} MiB, then {last:.0f} MiB")  # noqa: T201
            assert last - first < GROWTH_MIB, f"{name}: {first:.0f} MiB, then {last:.0f} MiB"
        assert sample(serving) == prepare(serving)
        print(found["answers"], found["steps"])  # noqa: T201


def test_many_models_are_listed_sampled_and_served_again_after_a_kill(
    tmp_path: Path, rounds: int
) -> None:
    count = MODELS * rounds

    def wire(number: int) -> dict[str, str]:
        return {"name": f"model{number}", "project": "many", "base_model": BASE}

    with Serving(tmp_path, BASE) as serving:
        took = []
        for number in range(count):
            began = time.monotonic()
            serving.post("/register", wire(number))
            serving.post("/_prepare_backend_for_training", {"model": wire(number)})
            took.append(time.monotonic() - began)
        tenth = max(1, count // 10)
        first, last = (sorted(part)[tenth // 2] for part in (took[:tenth], took[-tenth:]))
        began = time.monotonic()
        names = [it["id"] for it in httpx.get(f"{serving.openai}/v1/models").json()["data"]]
        listed_s = time.monotonic() - began
        assert {f"model{number}" for number in range(count)} <= set(names)
        ask = {"model": f"model{count // 2}", "max_tokens": 4}
        ask |= {"messages": [{"role": "user", "content": "x"}]}
        chat = f"{serving.openai}/v1/chat/completions"
        assert httpx.post(chat, json=ask, timeout=120).status_code == 200
        serving.process.kill()
        serving.process.wait(60)
        began = time.monotonic()
        serving.start()
        while httpx.post(chat, json=ask, timeout=300).status_code == 503:  # they come back in turn
            time.sleep(0.2)
            assert serving.process.poll() is None and time.monotonic() - began < 600
        restarted_s = time.monotonic() - began
        print(  # noqa: T201
            f"{count} models: prepared in {first:.3f} s, the last in {last:.3f} s; "
            f"listed in {listed_s:.3f} s; the middle one is served {restarted_s:.1f} s after a kill"
        )
        assert os.path.getsize(serving.state / "serving.json") < 1000 * count
