"""The tokenizer and chat template of a model directory."""

import json
import shutil
from pathlib import Path

import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.smollm2 import CHAT_TEMPLATE
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest, ModelError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of tiny-random that a test may change."""
    return Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))


def with_template(directory: Path, template: object) -> Tokenizer:
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": template}))
    return Tokenizer(directory)


def test_text_survives_encoding_and_decoding(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    text = "Grüße, 世界! 🦆\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Aé") == [65, 0xC3, 0xA9]
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_the_end_of_turn_tokens_are_found(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    assert tokenizer.eos_ids == {256, 258}
    assert tokenizer.is_special(258) and not tokenizer.is_special(65)
    assert tokenizer.vocab_size == 260


def test_tools_and_tool_calls_are_rendered(directory: Path) -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    text = Tokenizer(directory).render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Add."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\nTools you may call, one JSON schema a line:\n<tools>\n"
        '{"type": "function", "function": {"name": "add"}}\n</tools>\n'
        'Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n'
        "<|im_start|>user\nAdd.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_has_the_names_that_templates_use(directory: Path) -> None:
    template = (
        "{{ bos_token }}{{ strftime_now('%Y')|length }}{% for m in messages %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ {'a': '<é>'}|tojson }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = with_template(directory, template)
    message = {"role": "user", "content": ""}
    assert tokenizer.render([message, message]) == '<|endoftext|>4{"a": "<é>"}'


def test_an_error_raised_by_a_template_is_reported(directory: Path) -> None:
    tokenizer = with_template(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        tokenizer.render([])


def test_a_template_cannot_escape_its_sandbox(directory: Path) -> None:
    tokenizer = with_template(directory, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRequest):
        tokenizer.render([])


def test_a_template_file_takes_precedence_and_no_template_is_an_error(directory: Path) -> None:
    tokenizer = with_template(directory, None)
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.render([])
    (directory / "chat_template.jinja").write_text("from a file")
    assert Tokenizer(directory).render([]) == "from a file"


# As in the package: it ignores tools, and a past tool call is an empty turn.
SMOLLM2_ORIGINAL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
USER = {"role": "user", "content": "Add."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"function": {"name": "add", "arguments": '{"a": 2}'}},
    ],
}
RESULTS = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]


def test_smollm2_renders_talk_without_tools_as_its_package_does(directory: Path) -> None:
    original, ours = (
        with_template(directory, template) for template in (SMOLLM2_ORIGINAL, CHAT_TEMPLATE)
    )
    system, answer = {"role": "system", "content": "Be\n"}, {"role": "assistant", "content": " 2"}
    for talk in ([], [USER], [system, USER], [USER, answer, USER], [USER, system]):
        for generation in (True, False):
            assert ours.render(talk, None, generation) == original.render(talk, None, generation)


def test_smollm2_shows_tools_their_calls_and_their_results(directory: Path) -> None:
    text = with_template(directory, CHAT_TEMPLATE).render([USER, CALLED, *RESULTS], [TOOL])
    assert "trained by Hugging Face\n\n# Tools" in text
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_ignores_tools_is_recognised(directory: Path) -> None:
    ignoring = with_template(directory, SMOLLM2_ORIGINAL)
    assert not ignoring.shows_tools and not ignoring.shows_tool_calls
    showing = with_template(directory, CHAT_TEMPLATE)
    assert showing.shows_tools and showing.shows_tool_calls
    refusing = with_template(directory, "{{ raise_exception('no tools') }}")
    assert refusing.shows_tools and refusing.shows_tool_calls


# As Hermes has them: the template for tools fails without tools.
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for t in tools %}{{ t|tojson }}{% endfor %}" + PLAIN


def test_a_template_for_tools_is_used_only_with_tools(directory: Path) -> None:
    named = {"default": PLAIN, "tool_use": WITH_TOOLS}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    tokenizer = with_template(directory, entries)
    assert tokenizer.render([USER]) == "<user>Add."
    assert '"name": "add"' in tokenizer.render([USER], [TOOL])
    assert tokenizer.shows_tools and tokenizer.template_source == PLAIN
    assert {"tools", "messages"} <= tokenizer.template_variables
    ignoring = with_template(directory, [*entries[:1], {"name": "tool_use", "template": "Use."}])
    assert not ignoring.shows_tools
    alone = with_template(directory, [{"name": "tool_use", "template": WITH_TOOLS}])
    assert '"name": "add"' in alone.render([USER], [TOOL])


def test_a_template_for_tools_may_be_in_a_file_of_its_own(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(PLAIN)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    tokenizer = Tokenizer(directory)
    assert tokenizer.render([USER]) == "<user>Add."
    assert '"name": "add"' in tokenizer.render([USER], [TOOL])
    assert tokenizer.shows_tools and tokenizer.template_source == PLAIN


def test_each_template_decides_whether_it_knows_developers(directory: Path) -> None:
    named = {"default": PLAIN, "tool_use": "{# developer #}" + PLAIN}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    tokenizer = with_template(directory, entries)
    message = {"role": "developer", "content": "x"}
    assert tokenizer.render([message]) == "<system>x"
    assert tokenizer.render([message], [TOOL]) == "<developer>x"


def test_a_developer_message_is_a_system_message_unless_the_template_knows_it(
    directory: Path,
) -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    template = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert with_template(directory, template).render(messages) == "system "
    assert with_template(directory, template + "{# developer #}").render(messages) == "developer "


def test_calls_in_openais_older_form_are_rendered_too(directory: Path) -> None:
    call = {"name": "add", "arguments": "{}"}
    result = {"content": "2", "name": "add"}
    old = [{"role": "assistant", "function_call": call}, {"role": "function", **result}]
    new = [{"role": "assistant", "tool_calls": [{"function": call}]}, {"role": "tool", **result}]
    assert Tokenizer(directory).render([USER, *old]) == Tokenizer(directory).render([USER, *new])


def test_clients_write_the_same_message_in_several_ways(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    plain, parts = {"role": "user", "content": "ab"}, {"role": "user", "content": ["a", "b"]}
    assert tokenizer.render([parts]) == tokenizer.render([plain])
    # Streams of OpenAI's leave the arguments of a function without parameters empty.
    empty, none = (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
        for text in ("", "{}")
    )
    assert tokenizer.render([plain, empty]) == tokenizer.render([plain, none])
