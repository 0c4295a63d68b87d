"""Puzzles have one answer, a seed gives the same file again, and the reward is partial."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from examples.temporal_clue.generate import puzzles
from examples.temporal_clue.puzzle import SIZES, Clue
from examples.temporal_clue.reward import score
from examples.temporal_clue.solver import Solver
from trainer.harness.types import Completion, Example, WorkflowRun

DATA = Path(__file__).parents[3] / "examples" / "temporal_clue" / "data"


def clues_of(row: dict[str, Any]) -> list[Clue]:
    return [Clue(kind, tuple(about)) for kind, *about in row["clues"]]


def test_each_of_four_hundred_puzzles_has_exactly_one_answer() -> None:
    proven = 0
    for name, count in (("tiny", 360), ("small", 32), ("medium", 8)):
        solver = Solver(SIZES[name])
        for row in puzzles(SIZES[name], count, seed=11):
            clues = clues_of(row)
            assert solver.fits(clues, row["case"]) and solver.is_unique(clues, row["case"])
            places = zip("ABCD", row["case"].values(), strict=True)
            answers = [f"{letter}: {row['options'][letter][place]}" for letter, place in places]
            assert row["answer"].splitlines() == answers
            proven += 1
    assert proven == 400


def test_the_solver_agrees_with_brute_force() -> None:
    """For a tiny puzzle with any two of its clues removed."""
    (row,) = puzzles(SIZES["tiny"], 1, seed=5)
    clues, solver = clues_of(row), Solver(SIZES["tiny"])
    for dropped in itertools.combinations(range(len(clues)), 2):
        kept = [clue for n, clue in enumerate(clues) if n not in dropped]
        ruled = {(c.about, c.kind) for c in kept}
        possible = [
            case
            for case in itertools.product(range(3), repeat=4)
            if all(
                (case[place] == value) == (kind == "is")
                for (question, value), kind in ruled
                for place in [["who", "weapon", "room", "time"].index(str(question))]
            )
        ]
        assert solver.is_unique(kept, row["case"]) == (len(possible) == 1)


def test_a_deduction_puzzle_needs_all_of_its_clues() -> None:
    solver = Solver(SIZES["small"])
    for row in puzzles(SIZES["small"], 5, seed=3):
        clues = clues_of(row)
        for n in range(len(clues)):
            assert not solver.is_unique(clues[:n] + clues[n + 1 :], row["case"])


@pytest.mark.parametrize("name", ["large", "original"])
def test_larger_sizes_can_be_generated(name: str) -> None:
    (row,) = puzzles(SIZES[name], 1, seed=1)
    assert len(row["answer"].splitlines()) == len(row["options"]) == 5
    assert "Answer with one line for each of A, B, C, D, E" in row["question"]


@pytest.mark.parametrize(
    ("file", "size", "count", "seed"),
    [
        ("train", "tiny", 144, 1),
        ("validation", "tiny", 48, 2),
        ("small_train", "small", 96, 3),
        ("small_validation", "small", 32, 4),
    ],
)
def test_the_seed_reproduces_the_shipped_file(file: str, size: str, count: int, seed: int) -> None:
    made = "".join(json.dumps(row) + "\n" for row in puzzles(SIZES[size], count, seed))
    assert made == (DATA / f"{file}.jsonl").read_text()


def test_no_validation_puzzle_is_a_training_puzzle() -> None:
    texts = [
        {json.loads(row)["question"] for row in (DATA / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "validation")
    ]
    assert len(texts[0]) == 144 and len(texts[1]) == 48 and not texts[0] & texts[1]


@pytest.mark.parametrize(
    ("output", "finish", "reward"),
    [
        ("A: Rose\nB: rope\nC: hall\nD: noon", "stop", 1.0),
        ("A: Rose\nB: rope\nC: hall\nD: noon", "length", 0.8),
        ("A: Rose\nB: rope\nC: hall\nD: dusk", "stop", 0.2 + 0.1 + 0.7 * 3 / 4),
        ("A: Rose\nB: rope\nC: hall", "stop", (0.1 + 0.7) * 3 / 4),
        ("A: Rose\nA: Gray", "stop", (0.1 + 0.7) / 4),
        ("A: Zorro\nB: rope", "stop", (0.1 + 0.7) / 4),
        ("Rose with the rope", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_credit_is_partial(output: str, finish: str, reward: float) -> None:
    options = {"A": ["Rose", "Gray"], "B": ["rope"], "C": ["hall"], "D": ["noon", "dusk"]}
    answer = "A: Rose\nB: rope\nC: hall\nD: noon"
    example = Example("e", "q", answer, {"options": options})
    completion = Completion("policy", None, [], {"finish_reason": finish, "message": {}})
    run = WorkflowRun(example, 0, output=output, completions=[completion])
    assert score(run)["reward"] == pytest.approx(reward)
