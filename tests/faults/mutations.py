"""Faults for files: bytes that are cut, doubled, swapped or made up, and values of other types."""

import random
from typing import Any

BYTES = [b"\x00", b"\x07", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\t"]
TEXTS = [
    b"{", b"}", b"[", b"]", b'"', b"'", b":", b": ", b"- ", b"\n", b"#", b"&a ", b"*a", b"<<: *a\n",
    b"!!int x", b"!!bool x", b"!!timestamp x", b"!!python/object:os.system x", b"!x y", b"---\n",
    b"? [1, 2]\n: 3\n", b"2001-99-99", b"0x_", b".nan", b"-.inf", b"1e999", b"9" * 5000, b"null",
    b"1:99:99", b"~", b"=", b'"\\ud800"', b"\xf0\x9f\x98\x80", b"%YAML 9.9\n", b"|\n", b"[" * 3000,
    b"{a: " * 2000, b"x" * 70_000,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 1 << 70, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\x00", "\ud800",
    "9" * 400, [], {}, [[]], {"": {}}, [None], {"a": None}, "x" * 10_000,
]  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes of a file with one to three faults."""
    for _ in range(chance.randint(1, 3)):
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        to = min(to, at + chance.choice([1, 8, 200]))
        data = chance.choice(
            [
                data[:at] + data[to:],
                data[:to] + data[at:],
                data[:at],
                data[:at] + chance.choice(BYTES) + data[at:],
                data[:at] + chance.choice(TEXTS) + data[at:],
                data[:at] + chance.choice(TEXTS) + data[to:],
                data[:at] + chance.randbytes(max(1, to - at)) + data[to:],
            ]
        )
    return data


def damaged_lines(data: bytes, chance: random.Random) -> bytes:
    """The bytes of a text with a line deleted, repeated, moved, indented or given another value."""
    lines = data.splitlines(keepends=True)
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    line = lines[at]
    kind = chance.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(to, line)
    elif kind == 2:
        lines.insert(to, lines.pop(at))
    elif kind == 3:
        lines[at] = b" " * chance.randint(1, 4) + line
    else:
        lines[at] = line.partition(b":")[0] + b": " + chance.choice(TEXTS) + b"\n"
    return b"".join(lines)


def retyped(value: Any, chance: random.Random) -> Any:
    """A JSON value with one part of it, at any depth, missing or of another type."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(sorted(value))
        if chance.random() < 0.2:
            return {key: part for key, part in value.items() if key != name}
        if chance.random() < 0.1:
            return {**value, chance.choice(["", "x", "\x00", "__class__"]): 1}
        return {**value, name: retyped(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], retyped(value[at], chance), *value[at + 1 :]]
    return chance.choice(VALUES)
