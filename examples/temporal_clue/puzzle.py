"""A murder at a house party: the parts of a puzzle, and its text.

The clues of a `tiny` puzzle state the answer. In larger puzzles, suspects and weapons move from
room to room over time, and the answer must be deduced. Training needs no solver, so it is not here.
"""

from dataclasses import dataclass, field

NAMES: dict[str, list[str]] = {
    "who": ["White", "Green", "Brown", "Gray", "Rose", "Black", "Stone", "Clark"],
    "weapon": ["knife", "rope", "pistol", "wrench", "candle", "poison", "hammer", "sword"],
    "room": [
        "kitchen", "library", "hall", "study", "garden", "attic", "tower", "office", "chapel",
    ],
    "time": ["dawn", "breakfast", "noon", "lunch", "dinner", "dusk", "sunset", "midnight"],
    "motive": ["envy", "greed", "love", "fear", "revenge", "pride"],
}  # fmt: skip
LETTERS = "ABCDE"
QUESTIONS = {
    "who": "Who did it?",
    "weapon": "With what?",
    "room": "Where?",
    "time": "When?",
    "motive": "Why?",
}


@dataclass(frozen=True)
class Size:
    """Size of a puzzle: the number of options for each question."""

    name: str
    options: dict[str, int]
    moves: bool
    """Whether people and weapons move, so the answer must be deduced."""


def _size(name: str, who: int, weapon: int, room: int, time: int, motive: int = 0) -> Size:
    counts = {"who": who, "weapon": weapon, "room": room, "time": time, "motive": motive}
    return Size(name, {kind: n for kind, n in counts.items() if n}, moves=name != "tiny")


SIZES = {
    size.name: size
    for size in (
        _size("tiny", 3, 3, 3, 3),
        _size("small", 3, 3, 3, 2),
        _size("medium", 4, 4, 5, 3),
        _size("large", 5, 5, 7, 4, 4),
        _size("original", 6, 6, 9, 6, 6),
    )
}


@dataclass(frozen=True)
class Clue:
    """A true statement of one kind. `about` holds the indices of its options."""

    kind: str
    about: tuple[int | str, ...]


@dataclass(frozen=True)
class World:
    """The solution of a puzzle, as indices of options."""

    size: Size
    options: dict[str, list[str]]
    case: dict[str, int]
    suspect_at: list[list[int]] = field(default_factory=list)
    """[time][suspect] -> room"""
    weapon_at: list[list[int]] = field(default_factory=list)
    """[time][weapon] -> room"""
    motive_of: list[int] = field(default_factory=list)
    """[suspect] -> motive"""

    @property
    def answer(self) -> str:
        return "\n".join(
            f"{letter}: {self.options[kind][self.case[kind]]}"
            for letter, kind in zip(LETTERS, self.options, strict=False)
        )


_LOOKUP = {
    "who": ("The murderer was {}.", "{} is innocent."),
    "weapon": ("The {} killed him.", "The {} was not used."),
    "room": ("He died in the {}.", "Nobody died in the {}."),
    "time": ("It happened at {}.", "Nothing happened at {}."),
    "motive": ("The motive was {}.", "It was not about {}."),
}
RULES = (
    "At the time of the murder the murderer was in the room of the murder and no other suspect "
    "was there. The weapon of the murder was in that room then, and no other weapon was."
)
MOTIVES = " Every suspect has a motive, no two the same."


def sentence(clue: Clue, options: dict[str, list[str]]) -> str:
    """Return the clue as a sentence."""
    kind, about = clue.kind, clue.about
    if kind in ("is", "is not"):
        question, value = str(about[0]), int(about[1])
        return _LOOKUP[question][kind == "is not"].format(options[question][value])

    def name(question: str, place: int) -> str:
        return options[question][int(about[place])]

    match kind:
        case "suspect in":
            return f"At {name('time', 0)}, {name('who', 1)} was in the {name('room', 2)}."
        case "suspect not in":
            return f"At {name('time', 0)}, {name('who', 1)} was not in the {name('room', 2)}."
        case "weapon in":
            return f"At {name('time', 0)}, the {name('weapon', 1)} was in the {name('room', 2)}."
        case "weapon not in":
            return (
                f"At {name('time', 0)}, the {name('weapon', 1)} was not in the {name('room', 2)}."
            )
        case "together":
            return f"At {name('time', 0)}, {name('who', 1)} and {name('who', 2)} were together."
        case "apart":
            return f"At {name('time', 0)}, {name('who', 1)} and {name('who', 2)} were apart."
        case "holds":
            return f"At {name('time', 0)}, {name('who', 1)} was where the {name('weapon', 2)} was."
        case "motive":
            return f"{name('who', 0)}'s motive was {name('motive', 1)}."
        case "not motive":
            return f"{name('who', 0)}'s motive was not {name('motive', 1)}."
    raise AssertionError(kind)


def puzzle_text(world: World, clues: list[Clue]) -> str:
    """Return the whole puzzle as text."""
    sentences = " ".join(sentence(clue, world.options) for clue in clues)
    if not world.size.moves:
        return f"{sentences}\nWho, weapon, room, time?"
    lines = [
        "Mr. Boddy was murdered. " + RULES + (MOTIVES if world.motive_of else ""),
        "",
        sentences,
        "",
    ]
    for letter, kind in zip(LETTERS, world.options, strict=False):
        choices = ", ".join(world.options[kind])
        lines.append(f"{letter}. {QUESTIONS[kind]} ({choices})")
    letters = ", ".join(LETTERS[: len(world.options)])
    lines.append(
        f"Answer with one line for each of {letters}, like `A: {world.options['who'][0]}`."
    )
    return "\n".join(lines)
