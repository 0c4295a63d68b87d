import json
import re
from typing import Any

import pytest

from trainer.processes import large_json as module
from trainer.processes.large_json import encode_in_pieces, parse

GROUPS = [
    {"trajectories": [{"reward": 0.5, "ids": [1, 2]}, {"reward": None}], "é": {"b": 1, "a": "\n"}},
    {"trajectories": [], "exceptions": [[{"deep": [{"er": True}]}]]},
]


@pytest.mark.parametrize("value", [{"params": {"groups": GROUPS}}, GROUPS, [], {}, 1.5, None, "x"])
def test_the_pieces_join_to_the_text_of_json_dumps(value: Any) -> None:
    assert "".join(encode_in_pieces(value)) == json.dumps(value)
    assert parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize(
    "text",
    [
        *('["\\ud800", "\\ud83d\\ude00", "\\u0000"]', "[NaN, -Infinity, 1e999, -0.0, 5e-324]"),
        *('{"a": 1, "a": {"b": 2}}', "123456789012345678901234567890", "[" * 300 + "]" * 300),
        *("", "{} x", "[1,]", "01", '"\n"', '{"a"'),
    ],
)
def test_both_parsers_accept_and_reject_the_same_texts_as_json_loads(
    text: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST_PARSE_LIMIT", limit)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        body = text.encode(encoding)
        try:
            expected = json.loads(body)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                parse(body)
        else:
            assert repr(parse(body)) == repr(expected)


def test_trajectories_are_separate_pieces_and_tokens_are_not() -> None:
    pieces = list(encode_in_pieces({"groups": GROUPS}))
    assert "[1, 2]" in pieces and not any("null" in piece and "0.5" in piece for piece in pieces)
