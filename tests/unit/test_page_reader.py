"""The readers behind the page, over runs that are whole, damaged, empty or absent."""

import json
import math
from array import array
from pathlib import Path

import pytest

from bench.page_run import write_run
from kit.state_dir import HISTORY
from trainer.errors import BadRequest, DamagedBatch, NotFound
from trainer.page import audit, batches, compare, examples, groups, overview, series
from trainer.page.batches import Attempt, Group, TokenSequence
from trainer.page.reader import Run, Runs


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that no test changes."""
    directory = write_run(tmp_path_factory.mktemp("run"), steps=12, attempts=16)
    return Run("demo", "synthetic", directory)


def _history(directory: Path, *lines: str) -> Run:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / HISTORY).write_text("".join(lines), encoding="utf-8")
    return Run("p", "n", directory)


def _line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, "num_gradient_steps": 1, **metrics}) + "\n"


def test_a_run_is_found_from_the_state_its_project_its_own_and_a_bare_directory(shared):
    models = shared.directory.parent
    for root in (models.parent.parent, models.parent, models, shared.directory):
        assert [run.name for run in Runs(root).all()] == ["synthetic"], root
    assert Runs(models.parent.parent).get("demo", "synthetic").step() == 12


def test_only_appended_lines_are_parsed_and_a_new_file_is_read_anew(tmp_path):
    run = _history(tmp_path / "n", _line(1, reward=1.0), _line(2, reward=2.0))
    assert run.history.trained() == [1, 2]
    path = run.directory / HISTORY
    with path.open("a") as file:
        file.write(_line(3, reward=3.0) + '{"step": 4, "num_gra')
    seen = run.history._counts
    assert run.history.trained() == [1, 2, 3]
    assert run.history._counts is seen, "the first lines were parsed again"
    with path.open("a") as file:
        file.write('dient_steps": 1}\n')
    assert run.history.trained() == [1, 2, 3, 4]
    assert not run.history.lines.incomplete
    path.unlink()
    path.write_text(_line(7))
    assert run.history.trained() == [7]


def test_a_step_that_is_trained_again_replaces_its_means(tmp_path):
    run = _history(
        tmp_path / "n",
        _line(1, reward=0.9, loss=5.0),
        '{"step": 1, "val/reward": 0.2}\n{"step": 1, "val/reward": 0.4, "reward": 0.7}\n',
    )
    averaged = {"reward": 0.8, "loss": 5.0, "val/reward": 0.3, "num_gradient_steps": 1}
    assert run.history.steps[1] == pytest.approx(averaged)
    with (run.directory / HISTORY).open("a") as file:
        file.write(_line(1, reward=0.3, loss=math.nan))
    replaced = {"reward": 0.3, "val/reward": 0.3, "num_gradient_steps": 1}
    assert run.history.steps[1] == pytest.approx(replaced)
    with (run.directory / HISTORY).open("a") as file:
        file.write('{"step": 1, "reward": 0.5}\n')
    assert run.history.steps[1]["reward"] == pytest.approx(0.4), "the count starts over too"


def test_a_damaged_history_says_what_is_left_out(tmp_path):
    run = _history(
        tmp_path / "n",
        _line(1, **{"train/reward": 0.5}),
        "not json\n[1]\n",
        '{"step": "x"}\n{"step": true}\n{"no": 1}\n',
        '{"step": 2, "num_gradient_steps": 1, "train/reward": NaN, "loss/train": Infinity}\n',
        '{"step": 3, "num_gradient_steps": 1, "big": 1' + "0" * 400 + "}\n",
        '{"step": 4, "nu',
    )
    sentences = " ".join(overview.overview(run, "idle")["missing"])
    assert "5 lines of `history.jsonl` cannot be read" in sentences
    assert "2 values in `history.jsonl` are not finite" in sentences
    assert "The last line of `history.jsonl` is not complete" in sentences
    assert "The attempts of 3 steps from 1 to 3" in sentences
    found = series.series(run, ["train/reward"])
    assert found["step"] == [1, 2, 3] and found["series"]["train/reward"] == [0.5, None, None]


def test_a_run_without_steps_and_one_with_a_single_step_have_every_view(tmp_path):
    empty = _history(tmp_path / "empty")
    one = Run("demo", "synthetic", write_run(tmp_path / "one", steps=1, attempts=8))
    for run in (empty, one):
        overview.overview(run, "idle")
        assert len(audit.audit(run)["signs"]) == 4
        assert compare.compare(run, "base", "1")["n"] in (0, 1)
        examples.examples(run)
        series.steps(run)
    assert overview.overview(empty, "ended")["verdict"]["sentences"] == [
        "No step has been trained yet"
    ]
    absent = Run("p", "gone", tmp_path / "gone")
    assert "There is no `history.jsonl`" in overview.missing(absent)[0]


def test_many_steps_become_ranges_that_keep_the_extremes(tmp_path):
    lines = [_line(step, value=1000.0 if step == 777 else step % 7) for step in range(1, 2001)]
    run = _history(tmp_path / "n", *lines)
    found = series.series(run, ["value"], points=100)
    assert found["reduced"] and len(found["step"]) == 102  # the first and the last stay exact
    assert found["step"][0] == 1 and found["step"][-1] == 2000
    assert found["series"]["value"][0] == 1 and found["series"]["value"][-1] == 2000 % 7
    assert max(found["series"]["value:max"]) == 1000.0
    assert min(found["series"]["value:min"]) == 0.0
    assert series.series(run, ["value"], since=1990)["step"] == list(range(1990, 2001))


def test_a_step_its_groups_attempts_and_tokens_come_back_as_written(tmp_path):
    sequence = TokenSequence(
        ids=array("i", [5, 6, 7]),
        mask=b"\0\1\1",
        logprobs=array("f", [math.nan, -0.5, -0.25]),
        learner=array("f", [math.nan, -0.5, -0.5]),
        advantage=1.5,
        weight=1.0,
        policy_steps=[(1, 3, 4)],
    )
    text = "x" * (groups.CUT + 10)
    message = {"role": "assistant", "content": text, "trained": True}
    attempt = Attempt(
        number=0,
        reward=1.0,
        conversations=[{"messages": [message]}],
        example="a",
        parts={"exact": 1.0, "odd": math.nan},
        logs=["RULER explanation: it is right"],
        metadata={"reason/judge": "fine"},
        sequences=[sequence],
    )
    other = Attempt(number=1, reward=math.nan, conversations=[], example="a")
    path = batches.path_of(tmp_path, 7)
    written = [Group([attempt, other], "a", trainable=True)]
    batches.write(path, {"step": 7, "config": {"a": 1}}, written, {6: "six"}, split="train")
    run = Run("p", "n", tmp_path)
    assert run.kept() == {"train": [7]}
    step = groups.step(run, 7)
    assert step["groups"][0]["mean"] == 1.0 and step["settings"] == {"a": 1}
    found = groups.group(run, 7, 1)["attempts"]
    assert found[0]["conversations"][0]["messages"][0]["cut"] == 10
    assert found[0]["parts"] == {"exact": 1.0, "odd": None}
    assert [it["name"] for it in found[0]["judge"]] == ["judge", "RULER"]
    assert found[1]["reward"] is None
    whole = groups.attempt(run, 7, 1)["conversations"][0]["messages"][0]
    assert whole["content"] == text and "cut" not in whole
    tokens = groups.tokens(run, 7, 1, offset=1, limit=1)
    assert tokens["total"] == 3 and tokens["id"] == [6] and tokens["text"] == ["six"]
    assert tokens["logprob"] == [-0.5] and tokens["policy_step"] == [4]
    assert groups.tokens(run, 7, 1)["advantage"] == [None, 1.5, 1.5]
    for call in (groups.attempt, groups.tokens, groups.group):
        with pytest.raises(NotFound):
            call(run, 7, 99)


def test_validation_that_is_logged_in_parts_is_added_up(tmp_path):
    path = batches.path_of(tmp_path, 3, "val")
    for name in ("a", "b"):
        group = Group([Attempt(0, 1.0, [], example=name)], name)
        batches.write(path, {"step": 3}, [group], {}, split="val")
    run = Run("p", "n", tmp_path)
    assert [it["example"] for it in groups.step(run, 3, "val")["groups"]] == ["a", "b"]
    assert examples.means_at(run, "val", 3) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "text"])
def test_a_damaged_file_is_named_and_the_other_steps_are_read(tmp_path, damage):
    run = Run("demo", "synthetic", write_run(tmp_path, steps=3, attempts=8))
    path = batches.path_of(run.directory, 2)
    data = path.read_bytes()
    noise = data[:200] + bytes(byte ^ 255 for byte in data[200:])
    changed = {"cut": data[: len(data) // 2], "empty": b"", "noise": noise, "text": b"<html>" * 99}
    path.write_bytes(changed[damage])
    path.with_name("x").touch()  # the directory changes, as it does when a file is renamed
    with pytest.raises(DamagedBatch, match=r"0002\.db"):
        groups.group(run, 2, 1)
    assert groups.step(run, 3)["groups"]
    if damage != "noise":  # found when it is opened; its header is whole
        assert "`batches/0002.db` is damaged" in overview.missing(run)
    batches.write(path, {"step": 2}, [], {}, split="val")  # replaced, not added to
    assert groups.step(run, 2)["groups"] == []


def test_examples_are_ordered_and_paged(shared):
    found = examples.examples(shared, order="mean", limit=5)
    means = [row["mean"] for row in found["rows"]]
    assert means == sorted(means) and len(means) == 5
    rest = examples.examples(shared, order="mean", limit=1000, offset=5)
    assert len(rest["rows"]) == found["total"] - 5
    assert examples.slope([1, 2, 3], [1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert examples.slope([1], [1.0]) is None


def test_two_steps_are_compared_on_the_examples_of_both(shared):
    found = compare.compare(shared, "base", "10")
    assert found["split"] == "val" and found["n"] == 20
    low, high = found["interval"]
    assert low < found["mean_difference"] < high
    assert found["clear"] == (low > 0 or high < 0)
    with pytest.raises(BadRequest):
        compare.compare(shared, "first", "10")


def test_the_same_difference_on_all_examples_is_clear(tmp_path):
    for step, reward in ((1, 0.0), (2, 1.0)):
        attempts = [Attempt(number, reward, [], example=f"e{number}") for number in range(6)]
        found = [Group([attempt], attempt.example) for attempt in attempts]
        batches.write(batches.path_of(tmp_path, step), {"step": step}, found, {}, split="train")
    found = compare.compare(_history(tmp_path, _line(1), _line(2)), "1", "2")
    assert (found["n"], found["mean_difference"], found["interval"]) == (6, 1.0, None)
    assert found["clear"]
    assert not compare.compare(Run("p", "n", tmp_path), "1", "1")["clear"]


def test_the_audit_sees_length_a_single_part_validation_and_repeated_text(tmp_path):
    run = tmp_path
    lines = []
    for step in range(1, 21):
        late = step / 20
        attempts = [
            Attempt(
                number,
                late,
                [],
                example="e",
                parts={"style": late, "correct": 0.5 - 0.2 * late},
                tokens=int(100 + 2900 * late),
                preview="same" if late > 0.7 else f"{step}/{number}",
            )
            for number in range(8)
        ]
        path = batches.path_of(run, step)
        batches.write(path, {"step": step}, [Group(attempts, "e")], {}, split="train")
        lines.append(_line(step, **{"train/reward": late, "val/reward": 0.1}))
    signs = audit.audit(_history(run, *lines))["signs"]
    assert [sign["level"] for sign in signs] == ["alarm", "alarm", "alarm", "alarm"]
    calm = [_line(step, **{"train/reward": 0.5, "val/reward": 0.5}) for step in range(1, 21)]
    signs = audit.audit(_history(tmp_path / "calm", *calm))["signs"]
    assert {sign["level"] for sign in signs} == {"calm"}
