"""Bodies are valid Unicode, and their integers fit a float, whichever parser reads them."""

import json
import math
from typing import Any

import pytest

from trainer.server import strict_json
from trainer.server.strict_json import MAX_DIGITS, read, read_large

PAIR = r"\ud83d\ude00"


@pytest.fixture(params=["fast", "in turns"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reader of large bodies, with each of its parsers."""
    if request.param == "in turns":
        monkeypatch.setattr(strict_json, "FAST_PARSE_LIMIT", 0)
    return read_large


@pytest.mark.parametrize(
    "text",
    [
        *(r'"\ud800"', r'"\uDFff"', rf'"\ude00{PAIR}"', rf'"{PAIR}\ud83d"', r'{"\udc00": 1}'),
        *(r'"\\\ud800"', r'"\ud83d\\ude00"', r'"\ud83d\\\ude00"', r'"\\ud83d\ude00"'),
        *("9" * (MAX_DIGITS + 1), "-1" + "0" * 400, "[" + "1" * 5000 + "]", "", "{", "[1,]", "01"),
        "[" * 100_000,
    ],
)
def test_both_readers_refuse(text: str, large: Any) -> None:
    for parse in (read, large):
        with pytest.raises(json.JSONDecodeError):
            parse(text.encode())


@pytest.mark.parametrize("body", [b'"\xed\xa0\x80"', b'"\xff"', b'{"a": "\xc3"}'])
def test_bytes_that_are_not_utf8_are_refused(body: bytes, large: Any) -> None:
    for parse in (read, large):
        with pytest.raises(json.JSONDecodeError):
            parse(body)


@pytest.mark.parametrize(
    "text",
    [
        *(rf'"{PAIR}"', r'"\\ud800"', rf'"\\{PAIR}"', rf'{{"{PAIR}": ["\uD83D\uDE00{PAIR}"]}}'),
        *(f'"{"9" * 400}"', "9" * MAX_DIGITS, "-" + "9" * MAX_DIGITS, "1.5e300", "1e-400", "null"),
        '{"a": [1, {"b": "\\n\\u00e9"}], "a": 2}',
    ],
)
def test_both_readers_accept_what_python_reads(text: str, large: Any) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert read(text.encode(encoding)) == large(text.encode(encoding)) == json.loads(text)


def test_only_trajectories_may_hold_numbers_that_are_not_finite(large: Any) -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e400"):
        assert not math.isfinite(large(f'{{"logprob": {text}}}'.encode())["logprob"])
        with pytest.raises(json.JSONDecodeError, match="not a JSON number"):
            read(f"[{text}]".encode())
