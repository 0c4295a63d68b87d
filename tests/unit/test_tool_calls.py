import json

import pytest

from trainer.server.chat.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def parse(text: str, size: int) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    parser = ToolCallParser()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    content = "".join(parser.add(piece) for piece in pieces) + parser.finish()
    calls = [call["function"] for call in parser.calls]
    return content, [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_split(size: int) -> None:
    add = ("add", {"a": 1, "b": 2})
    assert parse(f"I add. {CALL}{CALL} Done", size) == ("I add.  Done", [add, add])


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool> too",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>',
        r'<tool_call>{"name": "x", "arguments": {"a": "\ud83d"}}</tool_call>',
        '<tool_call>{"name": "x", "arguments": {"a": ' + "[" * 9999 + "}}</tool_call>",
        # Complete, but an answer that holds it as an object could not be written.
        '<tool_call>{"name": "x", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
        '<tool_call>{"name": "x", "argum',
        "ends with <tool_ca",
    ],
)
def test_an_invalid_call_stays_in_the_content(text: str, size: int) -> None:
    assert parse(text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    "value", ["</tool_call>", "a</tool_call>b</tool_call>", 'say "</tool_call>']
)
def test_an_argument_may_hold_the_end_tag(value: str, size: int) -> None:
    call = json.dumps({"name": "write", "arguments": {"text": value, "then": "</tool_call>"}})
    written = ("write", {"text": value, "then": "</tool_call>"})
    text = f"So <tool_call>{call}</tool_call>{CALL} Done"
    assert parse(text, size) == ("So  Done", [written, ("add", {"a": 1, "b": 2})])
    assert parse(f"<tool_call>{call}", size) == ("", [written])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<tool_call>{"name": "x</tool_call>', ""),
        ('<tool_call>{"name": "x</tool_call> and ', " so"),
        ('<tool_call>{"name": "</tool_call></tool_call>', "  "),
        ('<tool_call>{"name": 3, "arguments": {"a": "</tool_call>"}}</tool_call>', ""),
    ],
)
def test_a_call_is_found_after_one_whose_string_never_ends(
    before: str, after: str, size: int
) -> None:
    found = (before.rstrip() if not after.strip() else before) + after.rstrip()
    assert parse(before + CALL + after, size) == (found, [("add", {"a": 1, "b": 2})])
    assert parse(before + after, size) == (before + after, [])


def test_a_call_without_its_end_tag_counts_if_its_json_is_complete() -> None:
    assert parse('<tool_call>{"name": "x", "arguments": {}}', 4) == ("", [("x", {})])
