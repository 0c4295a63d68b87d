"""Constraints on a choice's text, which llguidance turns into the tokens that may come next.

vLLM's backend `guidance` is the same library, so that a constraint means the same on every engine.
"""

import json
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Constraint
from trainer.errors import BadRequest

# As `json.dumps` writes it, and chat templates too. With free whitespace a small model may write
# nothing else until the limit.
JSON_STYLE: Json = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# JSON Schema leaves unknown formats without effect; llguidance would refuse the schema.
FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
}
# Pydantic's pattern of a Decimal has a look-ahead, which llguidance refuses; this is the same one.
SAME_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}
KEPT = 64  # compiled constraints; a run repeats a few
# Keywords that hold a schema or a list of schemas, and those that hold schemas by name.
NESTED = {"items", "prefixItems", "additionalProperties", "contains", "allOf", "anyOf", "oneOf"}
NAMED = {"properties", "patternProperties", "$defs", "definitions"}


def grammar(constraint: Constraint) -> str:
    """Return llguidance's grammar for a constraint, without checking it."""
    match constraint.kind:
        case "json_schema" | "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(json_schema(constraint)))
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.value)
        case "choice":
            alternatives = " | ".join(map(json.dumps, choices(constraint)))
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case "grammar":
            return LLMatcher.grammar_from_lark(constraint.value)


def json_schema(constraint: Constraint) -> Json:
    """Return the schema of a constraint, with the style in which JSON is written."""
    if constraint.kind == "json_object":
        schema: Any = {"type": "object"}
    else:
        schema = _parse(constraint)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _unusable(constraint, "a JSON schema must be an object")
    schema = without_unknown_formats(schema)
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**JSON_STYLE, **(own if isinstance(own, dict) else {})}}


def choices(constraint: Constraint) -> list[str]:
    texts = _parse(constraint)
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise _unusable(constraint, "the choices must be a list of one or more strings")
    return texts


def check(constraint: Constraint) -> None:
    """Raise BadRequest if a constraint cannot be compiled. Takes a while; call it in a thread."""
    if error := LLMatcher.validate_grammar(grammar(constraint)):
        raise _unusable(constraint, error)


class Grammars:
    """Compiles constraints for one model, in a thread: a large schema takes up to a second."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._path = directory / "tokenizer.json"
        self._vocabulary = max(vocabulary, tokenizer.vocab_size)
        self._eos = end_of_text(tokenizer)
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1)
        self._compiled: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()

    def compile(self, constraint: Constraint) -> "Future[LLMatcher]":
        """Return the matcher of a constraint as soon as it is compiled. Copy it before use."""
        if constraint not in self._compiled:
            self._compiled[constraint] = self._thread.submit(self._compile, constraint)
        self._compiled.move_to_end(constraint)
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[constraint]

    def _compile(self, constraint: Constraint) -> LLMatcher:
        text = grammar(constraint)
        if self._tokenizer is None:  # building it takes a second for a large vocabulary
            self._tokenizer = LLTokenizer(
                str(self._path), n_vocab=self._vocabulary, eos_token=self._eos
            )
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise _unusable(constraint, matcher.get_error())
        return matcher


def end_of_text(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that may follow a complete text: as in vLLM, the tokenizer's own one."""
    eos = tokenizer.encode(tokenizer.special_tokens.get("eos_token") or "")
    return eos if len(eos) == 1 else sorted(tokenizer.eos_ids)


def _parse(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.value)
    except ValueError as error:
        raise _unusable(constraint, f"it is not JSON: {error}") from None


def without_unknown_formats(schema: Any) -> Any:
    """Return a copy of a schema without the formats that llguidance does not know.

    Types and patterns are written as the library reads them.
    """
    if isinstance(schema, list):
        return [without_unknown_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key == "type" and isinstance(value, str):
            value = value.lower()  # Google's types are in capitals
        elif key == "pattern" and isinstance(value, str):
            value = SAME_PATTERNS.get(value, value)
        if key in NESTED:
            value = without_unknown_formats(value)
        elif key in NAMED and isinstance(value, dict):
            value = {name: without_unknown_formats(one) for name, one in value.items()}
        result[key] = value
    return result


def _unusable(constraint: Constraint, reason: str) -> BadRequest:
    kind = {
        "json_object": "JSON object",
        "json_schema": "JSON schema",
        "regex": "regular expression",
    }
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    # A regular expression's error says what is wrong in the line that starts with `error:`.
    message = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    hint = "Simplify it; `docs/concepts.md` explains structured output"
    if "Unimplemented keys" in message or "coerce_one_of" in message:
        hint = "Remove the keyword, or send `strict: false`, which skips it"
    return BadRequest(
        f"The {kind.get(constraint.kind, constraint.kind)} cannot be used: {message}", hint=hint
    )
