import json
from typing import Any

import pytest

from trainer.pieces import parse, pieces

GROUPS = [
    {"trajectories": [{"reward": 0.5, "ids": [1, 2]}, {"reward": None}], "é": {"b": 1, "a": "\n"}},
    {"trajectories": [], "exceptions": [[{"deep": [{"er": True}]}]]},
]


@pytest.mark.parametrize("value", [{"params": {"groups": GROUPS}}, GROUPS, [], {}, 1.5, None, "x"])
def test_the_pieces_are_what_json_dumps_gives(value: Any) -> None:
    assert "".join(pieces(value)) == json.dumps(value)
    assert parse(json.dumps(value).encode()) == value


def test_trajectories_are_apart_and_tokens_are_not() -> None:
    made = list(pieces({"groups": GROUPS}))
    assert "[1, 2]" in made and not any("null" in piece and "0.5" in piece for piece in made)
