"""The tokenizer and chat template of a base model, compatible with transformers. No torch here.

The template runs in jinja2's sandbox with the names that templates use: `raise_exception`,
`strftime_now`, `tojson`, the special tokens, and `{% generation %}` blocks.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from trainer.base_model.tiny_random import byte_letters
from trainer.errors import BadRequest, ModelError, Unsupported

Message = Mapping[str, Any]
# Tokens that end an assistant's turn. Some models name only one of theirs in their settings.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
# Tags of calls, which are text also where a model has them as special tokens.
TOOL_TAGS = ("<tool_call>", "</tool_call>")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# A conversation with a tool call, to find out what a chat template shows.
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBE_CALL = {"name": "probe", "arguments": {"probe_argument": 1}}
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": _PROBE_CALL}],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "probe_result"},
]
LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class Tokenizer:
    """Converts text to token ids and back. Cheap to build, and safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        # Ignore truncation and padding settings in the file.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = _read_json(directory / "tokenizer_config.json")
        self._directory = directory
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name in SPECIAL_NAMES
            if (token := self._settings.get(name))
        }
        self.eos_ids = frozenset(self._eos_ids())
        self._added = self._tokenizer.get_added_tokens_decoder()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens in it are recognised; none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of `token`. A character may span several tokens."""
        if added := self._added.get(token):
            return bytes(added.content, "utf-8")
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            return bytes(LETTER_BYTES[letter] for letter in text)
        if len(text) == 6 and text.startswith("<0x"):  # SentencePiece's byte tokens
            return bytes([int(text[3:5], 16)])
        return bytes(text.replace("▁", " "), "utf-8")

    def is_special(self, token: int) -> bool:
        """Whether a token is no text of an answer."""
        added = self._added.get(token)
        return added is not None and added.special and added.content not in TOOL_TAGS

    def text(self, ids: Iterable[int]) -> str:
        """The text of an answer: without special tokens, as engines decode it."""
        return self.decode([token for token in ids if not self.is_special(token)])

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, by default up to the start of the assistant's turn."""
        return self.encode(self.render(messages, tools, add_generation_prompt, **variables))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation with the model's chat template."""
        try:
            return self._template.render(
                messages=[self._with_known_role(normalise(message)) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as exc:
            raise BadRequest(
                f"The model's chat template rejected these messages: {exc}",
                hint="Check the roles, their order and the tool calls",
            ) from exc

    def _with_known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """OpenAI renamed the role `system` to `developer`; few chat templates know the new name."""
        if message.get("role") == "developer" and "developer" not in self._template_source:
            return {**message, "role": "system"}
        return message

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template renders `tools`; many ignore them without an error."""
        with contextlib.suppress(BadRequest):
            return self.render(_PROBE[:1], [_PROBE_TOOL]) != self.render(_PROBE[:1])
        return True  # the template refuses by itself

    @cached_property
    def shows_tool_calls(self) -> bool:
        """Whether the chat template renders past tool calls and their results."""
        with contextlib.suppress(BadRequest):
            text = self.render(_PROBE, [_PROBE_TOOL])
            return "probe_argument" in text and "probe_result" in text
        return True

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads, such as `enable_thinking`."""
        return frozenset(
            jinja2.meta.find_undeclared_variables(_environment().parse(self._template_source))
        )

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._template_source)

    @cached_property
    def _template_source(self) -> str:
        file = self._directory / "chat_template.jinja"
        source = (
            file.read_text(encoding="utf-8")
            if file.is_file()
            else self._settings.get("chat_template")
        )
        if isinstance(source, list):  # several named templates
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("tool_use") or named.get("default")
        if not source:
            raise ModelError(
                f"`{self._directory}` has no chat template",
                hint="Use an instruct model, or add a `chat_template.jinja`",
            )
        return str(source)

    @cached_property
    def _byte_level(self) -> bool:
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        kinds = [decoder, *decoder.get("decoders", [])]
        return any(kind.get("type") == "ByteLevel" for kind in kinds)

    def _eos_ids(self) -> Iterable[int]:
        for name in ("generation_config.json", "config.json"):
            given = _read_json(self._directory / name).get("eos_token_id")
            yield from given if isinstance(given, list) else [given] if given is not None else []
        for token in (self.special_tokens.get("eos_token"), *END_OF_TURN):
            if token and (number := self._tokenizer.token_to_id(token)) is not None:
                yield number


def normalise(message: Message) -> dict[str, Any]:
    """Convert a message to the form that templates expect: text, and tool arguments as objects."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text(part) for part in content)
    result = {**message, "content": content or ""}
    calls = message.get("tool_calls")
    if function := message.get("function_call"):  # OpenAI's older form of a call and its result
        calls = [{"type": "function", "function": function}]
    if message.get("role") == "function":
        result["role"] = "tool"
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        result.pop("tool_calls", None)
    return result


def _text(part: Mapping[str, Any] | str) -> str:
    if isinstance(part, str):  # LangChain's lists may hold plain texts
        return part
    if part.get("type") not in ("text", "refusal"):
        raise Unsupported(
            f"Message content of type `{part.get('type')}` is not supported",
            hint="Send text only",
        )
    return str(part.get("text") or part.get("refusal") or "")


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        # Arguments that are not JSON reach the template as the model wrote them.
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks an assistant's turn."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.globals.update(names)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, and no model was trained on that.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
