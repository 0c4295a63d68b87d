"""Proves with CP-SAT that a puzzle's clues allow exactly one answer."""

from typing import Any

from ortools.sat.python import cp_model

from examples.temporal_clue.puzzle import Clue, Size


class Solver:
    """The rules for one size as constraints. Each query adds its clues."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._model: Any = cp_model.CpModel()
        counts = size.options
        # case[question][option] is true if the option is the answer.
        self.case = {
            kind: [self._model.new_bool_var(f"{kind}{n}") for n in range(count)]
            for kind, count in counts.items()
        }
        for choices in self.case.values():
            self._model.add_exactly_one(choices)
        if size.moves:
            self._add_moves()

    def _add_moves(self) -> None:
        counts = self.size.options
        times, rooms = range(counts["time"]), range(counts["room"])
        self.suspect = self._places("s", counts["who"])
        self.weapon = self._places("w", counts["weapon"])
        for kind, at in (("who", self.suspect), ("weapon", self.weapon)):
            for one, guilty in enumerate(self.case[kind]):
                for time in times:
                    for room in rooms:
                        here = (self.case["time"][time], self.case["room"][room])
                        # The guilty suspect (or weapon) was there, and no other was.
                        self._model.add_bool_or([~here[0], ~here[1], ~guilty, at[time][one][room]])
                        self._model.add_bool_or([~here[0], ~here[1], guilty, ~at[time][one][room]])
        self.motive = [
            [self._model.new_bool_var(f"m{who}{why}") for why in range(counts.get("motive", 0))]
            for who in range(counts["who"])
        ]
        if counts.get("motive"):
            for who, motives in enumerate(self.motive):
                # At most one: a suspect's motive may be none of the question's options.
                self._model.add_at_most_one(motives)
                for why, has in enumerate(motives):
                    guilty = self.case["who"][who]
                    self._model.add_bool_or([~guilty, ~self.case["motive"][why], has])
            for why in range(counts["motive"]):
                self._model.add_at_most_one(motives[why] for motives in self.motive)

    def _places(self, name: str, count: int) -> list[list[list[Any]]]:
        """Create variables [time][who or weapon][room]; each is in one room at a time."""
        counts = self.size.options
        places = [
            [
                [self._model.new_bool_var(f"{name}{t}-{n}-{r}") for r in range(counts["room"])]
                for n in range(count)
            ]
            for t in range(counts["time"])
        ]
        for row in places:
            for rooms in row:
                self._model.add_exactly_one(rooms)
        return places

    def is_unique(self, clues: list[Clue], case: dict[str, int]) -> bool:
        """Whether `case` is the only answer that fits the clues. It must fit them."""
        model = self._model.clone()
        for clue in clues:
            self._add(model, clue)
        # Require that some part of the answer differs.
        model.add_bool_or([~self.case[kind][value] for kind, value in case.items()])
        return self._solve(model) == cp_model.INFEASIBLE

    def fits(self, clues: list[Clue], case: dict[str, int]) -> bool:
        """Whether `case` fits the clues."""
        model = self._model.clone()
        for clue in clues:
            self._add(model, clue)
        for kind, value in case.items():
            model.add_bool_and([self.case[kind][value]])
        return self._solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)

    def _solve(self, model: Any) -> int:
        solver = cp_model.CpSolver()
        # One worker: on problems this small, more cost more than they save.
        solver.parameters.num_workers = 1
        return int(solver.solve(model))

    def _add(self, model: Any, clue: Clue) -> None:
        kind = clue.kind
        if kind in ("is", "is not"):
            literal = self.case[str(clue.about[0])][int(clue.about[1])]
            model.add_bool_and([literal if kind == "is" else ~literal])
            return
        a, b, *rest = (int(part) for part in clue.about)
        match kind:
            case "suspect in":
                model.add_bool_and([self.suspect[a][b][rest[0]]])
            case "suspect not in":
                model.add_bool_and([~self.suspect[a][b][rest[0]]])
            case "weapon in":
                model.add_bool_and([self.weapon[a][b][rest[0]]])
            case "weapon not in":
                model.add_bool_and([~self.weapon[a][b][rest[0]]])
            case "together" | "apart" | "holds":
                other = (self.weapon if kind == "holds" else self.suspect)[a][rest[0]]
                for here, there in zip(self.suspect[a][b], other, strict=True):
                    if kind == "apart":
                        model.add_bool_or([~here, ~there])
                    else:
                        model.add_implication(here, there)
            case "motive":
                model.add_bool_and([self.motive[a][b]])
            case "not motive":
                model.add_bool_and([~self.motive[a][b]])
            case _:
                raise AssertionError(kind)
