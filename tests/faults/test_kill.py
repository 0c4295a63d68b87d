"""`kill -9` of server, engine and learner at every point of a step changes no checkpoint."""

import time
from pathlib import Path

import httpx
import pytest

from kit.manifest import sha256
from tests.faults.patient import BASE, POINTS, ask_for_step, hashes, prepare, sample, train
from tests.serving import Serving

KILLS_THE_SERVER = {point for point in POINTS if point.startswith("server-")}


def test_a_step_that_a_power_cut_takes_after_its_answer_is_made_again(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with Serving(tmp_path / "state", BASE, ART_FAULTS=str(faults)) as serving:
        train(serving, 1)
        run = serving.state / "faults" / "models" / "run"
        (faults / "server-streamed").touch()
        with pytest.raises(httpx.TransportError):
            ask_for_step(serving, 2)
        expected = hashes(serving)
        # As the disk is found after a cut: the answer was delivered, the checkpoint never synced.
        (run / "journal.0002.json").rename(run / "journal.0002.delivered.json")
        weights = run / "checkpoints" / "0002" / "adapter_model.safetensors"
        weights.write_bytes(b"")
        serving.process.wait(120)
        serving.start()
        assert prepare(serving) == 2
        assert hashes(serving) == expected
        assert sha256(weights) == expected["0002"][weights.name]
        assert sample(serving) == 2
        train(serving, 3)


def test_a_server_that_is_killed_between_steps_serves_the_same_again(tmp_path: Path) -> None:
    def served() -> list[str]:
        found = httpx.get(f"{serving.openai}/v1/models", timeout=60).json()["data"]
        return [model["id"] for model in found if model["id"].startswith("run")]

    with Serving(tmp_path, BASE) as serving:
        train(serving, 1)
        serving.process.kill()
        serving.process.wait(120)
        serving.start()
        while not served():  # the base model is there before
            assert serving.process.poll() is None
            time.sleep(0.1)
        assert sample(serving) == 1
        serving.process.terminate()
        serving.process.wait(120)
        serving.start()  # after an end that was asked for, clients register anew
        assert served() == []


@pytest.mark.timeout(1800)
def test_a_run_with_a_kill_in_every_step_ends_with_the_checkpoints_of_a_calm_one(
    tmp_path: Path, rounds: int
) -> None:
    # Random faults (`test_crashes`) meet the other points too; `--rounds 2` kills at every one.
    points = POINTS if rounds > 1 else POINTS[::2]
    steps = range(1, len(points) + 1)
    with Serving(tmp_path / "calm", BASE) as calm:
        calm_rows = [train(calm, step) for step in steps]
        expected = hashes(calm)
    faults = tmp_path / "faults"
    faults.mkdir()
    with Serving(tmp_path / "stormy", BASE, ART_FAULTS=str(faults)) as stormy:
        for step, point in zip(steps, points, strict=True):
            before = stormy.process.pid
            if point != "engine-sampling":
                (faults / point).touch()
            rows = train(stormy, step)
            if point == "engine-sampling":  # else the step's own canary would set it off
                (faults / point).touch()
            assert sample(stormy) == step  # served, whoever was killed
            assert not (faults / point).exists(), f"`{point}` was never reached"
            assert (stormy.process.pid != before) == (point in KILLS_THE_SERVER), point
            assert rows == calm_rows[step - 1], point
        assert hashes(stormy) == expected
    assert len(expected) == len(points) + 1
