"""Random JSON schemas of bounded size, for tests of structured output."""

import random
from typing import Any

NAMES = ["id", "name", "tags", "unit price", "ist_gültig", "x"]


def random_schema(seed: int) -> dict[str, Any]:
    """Return an object's schema that uses most of what clients send."""
    chance = random.Random(seed)
    definitions = {f"Part{number}": _schema(chance, 1, []) for number in range(2)}
    schema = _object(chance, 2, sorted(definitions))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": definitions,
    } | schema


def _schema(chance: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    """`depth`: how many objects and arrays may be nested; `names`: definitions to refer to."""
    kinds = [_enum, _const, _integer, _number, _string, _pattern, _format, _plain]
    if names and chance.random() < 0.25:
        return {"$ref": f"#/$defs/{chance.choice(names)}"}
    if depth and chance.random() < 0.45:
        return chance.choice([_object, _array, _any_of])(chance, depth - 1, names)
    return chance.choice(kinds)(chance)


def _object(chance: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = chance.sample(NAMES, chance.randint(1, 4))
    properties = {key: _schema(chance, depth, names) for key in keys}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if required := [key for key in keys if chance.random() < 0.6]:
        schema["required"] = required
    return schema


def _array(chance: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    least = chance.randint(0, 2)
    items = _schema(chance, depth, names)
    most = least + chance.randint(0, 2)
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _any_of(chance: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"anyOf": [_schema(chance, depth, names), {"type": "null"}]}


def _enum(chance: random.Random) -> dict[str, Any]:
    return {"enum": chance.sample(["red", 'say "hi"', "naïve", 3, -1.5, True, None], 3)}


def _const(chance: random.Random) -> dict[str, Any]:
    return {"const": chance.choice(["fixed", 7, {"a": [1, "b"]}])}


def _integer(chance: random.Random) -> dict[str, Any]:
    least = chance.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + chance.choice([0, 3, 90, 999])}


def _number(chance: random.Random) -> dict[str, Any]:
    least = round(chance.uniform(-20, 20), 2)
    return {
        "type": "number",
        "minimum": least,
        "exclusiveMaximum": least + chance.choice([0.5, 40]),
    }


def _string(chance: random.Random) -> dict[str, Any]:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _pattern(chance: random.Random) -> dict[str, Any]:
    patterns = ["^[a-f]{2,4}$", "^(GET|POST) /[a-z]{1,5}$", "^\\d{3}-\\w{2}$", "^[^\\s]{1,6}$"]
    return {"type": "string", "pattern": chance.choice(patterns)}


def _format(chance: random.Random) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(["date", "uuid", "ipv4", "date-time"])}


def _plain(chance: random.Random) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null"])}
