"""A text environment as in Gymnasium: guess a number, with a hint after every wrong guess."""

import random
import re
from typing import Any


class Guess:
    """The guess must be the only number of the action; any other action is a lost step."""

    def __init__(self, highest: int = 10) -> None:
        self.highest = highest

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.secret = random.Random(seed).randint(1, self.highest)
        return f"Guess a number from 1 to {self.highest}. Answer with the number only.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        numbers = re.findall(r"\d+", action)
        if len(numbers) != 1:
            return "That is not one number. Guess again.", -0.1, False, False, {"won": False}
        guess = int(numbers[0])
        if guess == self.secret:
            return "Right.", 1.0, True, False, {"won": True}
        closeness = 1 - min(abs(guess - self.secret) / self.highest, 1)
        hint = "higher" if guess < self.secret else "lower"
        return f"The number is {hint}. Guess again.", 0.2 * closeness, False, False, {"won": False}
