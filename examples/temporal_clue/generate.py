"""Generate Temporal Clue puzzles. A solver proves that each has exactly one answer.

    python -m examples.temporal_clue.generate --size tiny --count 144 --seed 1 > train.jsonl

The same seed always gives the same file.
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import click

from examples.temporal_clue.puzzle import LETTERS, NAMES, SIZES, Clue, Size, World, puzzle_text
from examples.temporal_clue.solver import Solver


def puzzles(size: Size, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` puzzles as rows of a dataset, each generated from its own seed."""
    solver = Solver(size)
    for number in range(count):
        rng = random.Random(f"{size.name}/{seed}/{number}")
        world, clues = draw(size, rng, solver)
        yield {
            "id": f"{size.name}-{seed}-{number}",
            "question": puzzle_text(world, clues),
            "answer": world.answer,
            "options": dict(zip(LETTERS, world.options.values(), strict=False)),
            "clues": [[clue.kind, *clue.about] for clue in clues],
            "case": world.case,
        }


def draw(size: Size, rng: random.Random, solver: Solver) -> tuple[World, list[Clue]]:
    """Draw a world, and clues that allow only its answer."""
    world = _world(size, rng)
    clues = _deduction(world, rng, solver) if size.moves else _lookup(world)
    rng.shuffle(clues)
    if not (solver.fits(clues, world.case) and solver.is_unique(clues, world.case)):
        raise AssertionError("the puzzle does not have exactly one answer")
    return world, clues


def _world(size: Size, rng: random.Random) -> World:
    options = {kind: rng.sample(NAMES[kind], n) for kind, n in size.options.items()}
    # A reader expects times in chronological order.
    options["time"].sort(key=NAMES["time"].index)
    case = {kind: rng.randrange(n) for kind, n in size.options.items()}
    if not size.moves:
        return World(size, options, case)
    counts = size.options
    at = {
        kind: [[rng.randrange(counts["room"]) for _ in range(counts[kind])]
               for _ in range(counts["time"])]
        for kind in ("who", "weapon")
    }  # fmt: skip
    others = [room for room in range(counts["room"]) if room != case["room"]]
    for kind, places in at.items():
        now = places[case["time"]]
        for one, room in enumerate(now):
            if one == case[kind]:
                now[one] = case["room"]
            elif room == case["room"]:
                now[one] = rng.choice(others)
    motives: list[int] = []
    if "motive" in counts:
        # With more suspects than motives, indices past the options are motives not asked for.
        motives = rng.sample(range(max(counts["who"], counts["motive"])), counts["who"])
        held = motives.index(case["motive"]) if case["motive"] in motives else None
        if held is not None:
            motives[held] = motives[case["who"]]
        motives[case["who"]] = case["motive"]
    return World(size, options, case, at["who"], at["weapon"], motives)


def _lookup(world: World) -> list[Clue]:
    """Mention every option once, so that guessing among the mentioned ones gains nothing."""
    return [
        Clue("is" if value == world.case[kind] else "is not", (kind, value))
        for kind, options in world.options.items()
        for value in range(len(options))
    ]


def _deduction(world: World, rng: random.Random, solver: Solver) -> list[Clue]:
    """Choose a minimal set of true clues that allows only the answer."""
    pool = _true_clues(world)
    rng.shuffle(pool)
    if not solver.is_unique(pool, world.case):
        # Movements alone do not always determine the time, so one clue states it.
        pool.insert(0, Clue("is", ("time", world.case["time"])))
        if not solver.is_unique(pool, world.case):
            pool.insert(0, Clue("is", ("room", world.case["room"])))
    few, many = 0, len(pool)
    while few < many:  # find the shortest sufficient prefix of the pool
        middle = (few + many) // 2
        if solver.is_unique(pool[:middle], world.case):
            many = middle
        else:
            few = middle + 1
    clues = pool[:many]
    for clue in list(clues):  # then drop clues that are not needed
        without = [other for other in clues if other is not clue]
        if solver.is_unique(without, world.case):
            clues = without
    return clues


def _true_clues(world: World) -> list[Clue]:
    counts, found = world.size.options, []
    for time in range(counts["time"]):
        for kind, label, places in (
            ("who", "suspect", world.suspect_at[time]),
            ("weapon", "weapon", world.weapon_at[time]),
        ):
            for one in range(counts[kind]):
                for room in range(counts["room"]):
                    word = "in" if places[one] == room else "not in"
                    found.append(Clue(f"{label} {word}", (time, one, room)))
        suspects, weapons = world.suspect_at[time], world.weapon_at[time]
        for one, room in enumerate(suspects):
            for other in range(one):
                word = "together" if suspects[other] == room else "apart"
                found.append(Clue(word, (time, one, other)))
            found += [Clue("holds", (time, one, w)) for w, at in enumerate(weapons) if at == room]
    for kind in ("time", "room"):
        found += [Clue("is not", (kind, n)) for n in range(counts[kind]) if n != world.case[kind]]
    for who, motive in enumerate(world.motive_of):
        for why in range(counts["motive"]):
            found.append(Clue("motive" if motive == why else "not motive", (who, why)))
    return found


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="tiny", show_default=True)
@click.option("--count", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(size: str, count: int, seed: int) -> None:
    """Print puzzles as JSON lines."""
    for row in puzzles(SIZES[size], count, seed):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
