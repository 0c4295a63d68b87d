"""What the learner hands to the server: the tokens of a step as it trained them."""

import math
import random
from pathlib import Path

import pytest
import torch

from tests.unit.tiny_learner import LORA, files, groups, learner, train, trajectory
from trainer.learner.learner import Learner
from trainer.learner.record import Record, file_of
from trainer.server.learner_tokens import LearnerTokens, read
from trainer.step_config import SftConfig


def recording(record: Record = "all") -> Learner:
    one = learner()
    one.record = record
    return one


def tokens(checkpoints: Path, step: int = 1) -> LearnerTokens:
    found = read(file_of(checkpoints, step), step)
    assert found is not None
    return found


def test_a_step_is_handed_over_with_the_learners_logprobs(tmp_path: Path) -> None:
    at = tmp_path / "checkpoints"
    equal = [trajectory(random.Random(9), 1.0) for _ in range(2)]
    given = [*groups(1, 2), {"trajectories": equal}]
    one = recording()
    rows = train(one, at, given, grad_accumulation_sequences=8, packed_sequence_length=64)
    found = tokens(at)
    assert [drop["reason"] for drop in found.dropped] == ["equal_rewards"]
    assert set(found.sequences) == {(group, number) for group in (0, 1) for number in range(3)}
    differences = []
    for (group, number), (sequence,) in found.sequences.items():
        content = given[group]["trajectories"][number]["messages_and_choices"][1]["logprobs"]
        chosen = [place for place, mask in enumerate(sequence.mask) if mask]
        names = [f"token_id:{sequence.ids[place]}" for place in chosen]
        assert names == [token["token"] for token in content["content"]]
        assert {round(sequence.logprobs[place], 3) for place in chosen} == {-5.5}
        assert sequence.learner and sequence.advantage and sequence.weight
        assert all(
            math.isnan(value) != bool(mask)
            for value, mask in zip(sequence.learner, sequence.mask, strict=True)
        )
        prompt, completion = sequence.ids[: chosen[0]], sequence.ids[chosen[0] :]
        fresh = learner().score(tmp_path / "new", 0, LORA, list(prompt), list(completion))
        # The only gradient step began with the weights of step 0.
        assert [sequence.learner[place] for place in chosen] == pytest.approx(fresh, abs=1e-4)
        differences += [abs(sequence.learner[place] + 5.5) for place in chosen]
    # The metric of the step is the mean over the same numbers.
    assert sum(differences) / len(differences) == pytest.approx(rows[0]["loss/sampler_gap"], 1e-4)


def test_several_gradient_steps_and_supervised_steps_are_handed_over(tmp_path: Path) -> None:
    at = tmp_path / "checkpoints"
    one = recording()
    rows = train(one, at, groups(1, 4), packed_sequence_length=32)
    assert rows[0]["num_gradient_steps"] > 1
    assert len(tokens(at).sequences) == 12
    file_of(at, 99).touch()
    config = SftConfig(learning_rate=1e-3, batch_size=1)
    list(one.train(at, [{"trajectories": groups(2, 1)[0]["trajectories"]}], config, LORA))
    found = tokens(at, 2)
    assert set(found.sequences) == {(number, 0) for number in range(3)}
    for (sequence,) in found.sequences.values():
        assert sequence.learner and sequence.advantage == 1.0
        chosen = [place for place, mask in enumerate(sequence.mask) if mask and place]
        assert chosen and all(sequence.learner[place] < 0 for place in chosen)
    assert not file_of(at, 99).exists(), "the file of an earlier server is not left behind"
    assert file_of(at, 1).exists(), "the server may still read the file of the step before"


def test_recording_changes_no_weight_and_is_off_by_default(tmp_path: Path) -> None:
    plain, recorded = tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints"
    train(learner(), plain, groups(1))
    train(recording(), recorded, groups(1))
    assert files(plain, 1) == files(recorded, 1)
    assert not file_of(plain, 1).parent.exists() and file_of(recorded, 1).is_file()


def test_a_step_is_trained_although_its_tokens_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = tmp_path / "checkpoints"
    file_of(at, 1).parent.write_text("a file where the directory should be")
    *_, last = train(recording(), at, groups(1))
    assert last["step"] == 1 and "the tokens of step 1 are not recorded" in caplog.text


def test_a_step_that_teaches_nothing_is_handed_over_too(tmp_path: Path) -> None:
    at = tmp_path / "checkpoints"
    train(recording("own"), at, [{"trajectories": []}])
    assert tokens(at).sequences == {} and tokens(at).dropped[0]["reason"] == "empty_group"
    assert torch.is_grad_enabled()
