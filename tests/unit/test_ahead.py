import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.tiny_learner import LORA, groups, learner
from trainer.learner.ahead import Ahead, next_request
from trainer.learner.precedence import Precedence
from trainer.learner.ready import Ready
from trainer.learner.worker import handlers, reading
from trainer.processes.mps import PRIORITY_VARIABLE
from trainer.step_config import GrpoConfig


class Seen(Precedence):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__(lambda priority: None, -1)
        self.calls: list[Any] = []

    def next_step(self) -> None:
        self.calls.append("step")

    def next_row(self, waits: bool) -> None:
        self.calls.append(waits)


def request(path: Path, seed: int, **settings: Any) -> Path:
    config = GrpoConfig(learning_rate=1e-2, **settings).model_dump(mode="json")
    body = {"groups": groups(seed), "config": config, "step": int(path.name.split(".")[1])}
    path.write_text(json.dumps(body))
    return path


def test_the_request_after_one_has_the_next_number() -> None:
    assert next_request(Path("a/journal.0009.json")) == Path("a/journal.0010.json")
    assert next_request(Path("a/journal.9999.json")) == Path("a/journal.10000.json")
    assert next_request(Path("a/request.json")) is None


def test_a_request_is_prepared_once_and_only_if_it_is_there(tmp_path: Path) -> None:
    prepared: list[str] = []

    def prepare(path: Path) -> str:
        prepared.append(path.read_text())
        return prepared[-1]

    ahead, path = Ahead(prepare), tmp_path / "journal.0001.json"
    ahead.look(path)
    assert prepared == []
    path.write_text("one")
    for _ in range(3):
        ahead.look(path)
    assert ahead.take(path) == "one" and prepared == ["one"]
    assert ahead.take(path) is None


def test_a_request_that_replaced_another_is_not_mistaken_for_it(tmp_path: Path) -> None:
    path, other, was_read = tmp_path / "journal.0001.json", tmp_path / "other", threading.Event()
    path.write_text("one")

    def prepare(path: Path) -> str:
        text = path.read_text()
        was_read.set()
        return text

    ahead = Ahead(prepare)
    ahead.look(path)
    assert was_read.wait(10)
    other.write_text("two")
    other.rename(path)
    assert ahead.take(path) is None
    ahead.look(path)
    assert ahead.take(tmp_path / "journal.0002.json") is None  # of another model, say


def test_what_cannot_be_prepared_is_left_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "journal.0001.json"
    path.write_text("{")
    ahead = Ahead(lambda path: json.loads(path.read_text()))
    ahead.look(path)
    assert ahead.take(path) is None


def test_a_step_waits_for_what_is_being_prepared(tmp_path: Path) -> None:
    path, go = tmp_path / "journal.0001.json", threading.Event()
    path.write_text("one")
    ahead = Ahead(lambda path: go.wait(10) and path.read_text())
    ahead.look(path)
    threading.Timer(0.05, go.set).start()
    assert ahead.take(path) == "one"


def trained(directory: Path, *, early: bool) -> tuple[list[Any], list[type], bytes]:
    """Two steps, the second of which is journaled before the first has trained, or after it."""
    one, kinds = learner(), list[type]()
    train = handlers(one)["train"]

    def watched(groups: Any, **params: Any) -> Any:
        kinds.append(type(groups))
        return train(groups=groups, **params)

    seen = Seen()
    call, rows = reading(watched, one, seen), list[Any]()
    config = GrpoConfig(learning_rate=1e-2).model_dump(mode="json")
    one.prepare(directory / "c", LORA)
    given = {"checkpoints": str(directory / "c"), "config": config, "lora": LORA.model_dump()}
    paths = [directory / "journal.0001.json", directory / "journal.0002.json"]
    request(paths[0], 0)
    for number, path in enumerate(paths):
        if number != early:
            request(paths[1], 1)
        found = list(call(request=str(path), parent=number, **given))
        rows += [row for row in found if "checkpoint" not in row]
        assert found[-1]["step"] == number + 1
    assert seen.calls == ["step", early, "step", False]
    return rows, kinds, (directory / "c" / "0002" / "adapter_model.safetensors").read_bytes()


def test_a_step_that_was_prepared_ahead_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ahead = trained(tmp_path / "a", early=True)
    after = trained(tmp_path / "b", early=False)
    assert ahead[1] == [list, Ready]
    assert after[1] == [list, list]
    assert ahead[0] == after[0] and ahead[2] == after[2]


@pytest.mark.parametrize("prepared", [{}, {"scale_rewards": True}])
def test_a_request_is_prepared_again_for_other_settings(
    tmp_path: Path, prepared: dict[str, Any]
) -> None:
    config, one, other = GrpoConfig(learning_rate=1e-2), learner(), learner()
    one.prepare(tmp_path / "one", LORA)
    ready = one.ready(groups(0), config.model_copy(update=prepared), 0)
    rows = list(one.train(tmp_path / "one", ready, config, LORA))
    assert rows[:-1] == list(other.train(tmp_path / "other", groups(0), config, LORA))[:-1]


def priorities_of(steps: list[list[bool]]) -> list[list[int]]:
    """The priority of each row of each step, by whether the next request was there."""
    now, found = [0], []
    precedence = Precedence(lambda priority: now.__setitem__(0, priority), -1)
    for step in steps:
        precedence.next_step()
        found.append([])
        for waits in step:
            precedence.next_row(waits)
            found[-1].append(now[0])
    return found


def test_gradients_come_after_requests_while_the_engine_is_slower() -> None:
    assert priorities_of([[False] * 4] * 9) == [[0] * 4] * 9
    late = [False, False, True, True]  # as it should be
    assert priorities_of([late] * 9) == [[0] * 4] * 9


def test_gradients_are_computed_beside_requests_once_the_learner_is_slower() -> None:
    shares = [-sum(step) for step in priorities_of([[True] * 8] * 7 + [[False] * 8] * 4)]
    assert shares == [0, 2, 4, 6, 8, 8, 8, 8, 6, 4, 2]


def test_without_mps_the_learner_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Precedence.from_environment(torch.device("cuda")) is None
    monkeypatch.setenv(PRIORITY_VARIABLE, "-1")
    assert Precedence.from_environment(torch.device("cpu")) is None
