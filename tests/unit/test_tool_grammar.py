"""The grammar of answers that call tools, as llguidance reads it."""

import json
import re
from typing import Any

import llguidance
import pytest

from trainer.base_model.resolve import resolve
from trainer.engines.constraints import check
from trainer.engines.engine import Constraint
from trainer.errors import BadRequest
from trainer.server.chat.tool_grammar import tool_grammar
from trainer.server.chat.tools import tool_use

NUMBERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a"],
    "$defs": {"number": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
STRICT = {"type": "function", "function": {**ADD["function"], "name": "sum", "strict": True}}  # type: ignore[dict-item]
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [ADD, STRICT, PING]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("ping")]}}
WRONG = call("add", a="x")
OTHER = call("subtract", a=1)
TWO = call("add", a=1) + "\n" + call("sum", a=2, b=None)


def matches(grammar: str, text: str) -> bool:
    """Whether a model that follows the grammar may write this text and end after it."""
    tokenizer = llguidance.LLTokenizer((resolve("tiny-random") / "tokenizer.json").read_text())
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())  # tiny-random has a token for each byte
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("choice", "parallel", "possible", "impossible"),
    [
        (
            "required",
            None,
            [call("add", a=1), call("ping"), TWO],
            ["Hi", "", WRONG, OTHER, call("add"), call("add", a=1, c=2), "Hi " + call("ping")],
        ),
        ("required", False, [call("ping")], [TWO, "Hi"]),
        (named("ping"), None, [call("ping")], [call("add", a=1), call("ping", a=1), TWO]),
        (
            "auto",
            None,
            ["Hi", "", "a < b", "<tool_cal", f"Hi\n{TWO}\nbye", call("add", any="thing")],
            [call("sum", a="x"), OTHER, f"Hi {OTHER}", "Hi <tool_call> there"],
        ),
        ("auto", False, ["Hi", f"Hi {call('ping')}"], [TWO, f"{call('ping')} bye"]),
        (ALLOWED, None, ["Hi", call("ping")], [call("add", a=1)]),
    ],
)
def test_answers_follow_the_choice_of_tools(
    choice: Any, parallel: bool | None, possible: list[str], impossible: list[str]
) -> None:
    grammar = tool_grammar(tool_use(TOOLS, choice, parallel))
    assert [text for text in possible if not matches(grammar, text)] == []
    assert [text for text in impossible if matches(grammar, text)] == []


def test_with_a_schema_an_answer_is_calls_or_json() -> None:
    content = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    grammar = tool_grammar(tool_use(TOOLS, "auto", None), content)
    assert matches(grammar, TWO) and matches(grammar, '{"x": 1}')
    assert not matches(grammar, "Hi") and not matches(grammar, '{"y": 1}')


def test_an_unknown_keyword_is_an_error_for_a_strict_function_only() -> None:
    unknown = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        function = {"name": "f", "parameters": unknown, "strict": strict}
        use = tool_use([{"type": "function", "function": function}], "required", None)
        assert bool(llguidance.LLMatcher.validate_grammar(tool_grammar(use))) is strict


def test_a_format_that_nobody_knows_has_no_effect() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    use = tool_use([{"type": "function", "function": function}], "required", None)
    assert matches(tool_grammar(use), call("f", a="x"))


def test_schemas_of_google_and_pydantic_are_read() -> None:
    decimal = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    schema = {"type": "OBJECT", "properties": {"a": decimal}, "required": ["a"]}
    function = {"name": "f", "parameters": schema, "strict": True}
    grammar = tool_grammar(tool_use([{"type": "function", "function": function}], "required", None))
    for number in ("1", "-0.5", "+12.", ".5", "007"):
        assert re.match(decimal["pattern"], number) and matches(grammar, call("f", a=number))
    for other in ("", "-", ".", "+.", "1.2.3", "x"):
        assert not re.match(decimal["pattern"], other)
        assert not matches(grammar, call("f", a=other))


@pytest.mark.parametrize(
    "keyword", [{"not": {}}, {"oneOf": [{"type": "string"}, {"minLength": 1}]}]
)
def test_a_keyword_that_a_strict_schema_cannot_have_is_explained(keyword: Any) -> None:
    schema = {"properties": {"a": keyword}, "x-guidance": {"lenient": False}}
    with pytest.raises(BadRequest, match="cannot be used") as refusal:
        check(Constraint("json_schema", json.dumps(schema)))
    assert "`strict: false`" in refusal.value.hint
