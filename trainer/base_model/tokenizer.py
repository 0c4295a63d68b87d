"""The tokenizer and chat template of a base model, compatible with transformers. No torch here.

`trainer/base_model/chat_template.py` runs the template.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from trainer.base_model.chat_template import (
    DEFAULT,
    TOOL_USE,
    ChatTemplate,
    one_line,
    read_sources,
    rejected,
)
from trainer.base_model.json_files import AGAIN, read_object
from trainer.base_model.messages import Message, normalise
from trainer.base_model.tiny_random import byte_letters
from trainer.errors import BadRequest, ModelError

# Tokens that end an assistant's turn. Some models name only one of theirs in their settings.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
# Tags of calls, which are text also where a model has them as special tokens.
TOOL_TAGS = ("<tool_call>", "</tool_call>")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# A conversation with a tool call, to find out what a chat template shows.
_NO_PARAMETERS = {"type": "object", "properties": {}}
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": _NO_PARAMETERS},
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
TOKENIZER = "tokenizer.json"
LARGE = 1 << 14  # characters; tokenizing them takes milliseconds
LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class Tokenizer:
    """Converts text to token ids and back. Cheap to build, and safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _read_tokenizer(directory / TOKENIZER)
        # Ignore truncation and padding settings in the file.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = _read_json(directory / "tokenizer_config.json")
        self._directory = directory
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_tokens = {
            name: token
            for name in SPECIAL_NAMES
            if (token := _special_token(directory / "tokenizer_config.json", name, self._settings))
        }
        self.eos_ids = frozenset(self._eos_ids())
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(
            token
            for token, added in self._added.items()
            if added.special and added.content not in TOOL_TAGS
        )
        self._spelled: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens in it are recognised; none are added."""
        if len(text) < LARGE:
            short: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return short
        # A batch lets other threads run in the meantime, and a single text does not.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    @cached_property
    def context(self) -> int | None:
        """The most tokens that any engine takes, or None if the model does not say."""
        config = _read_json(self._directory / "config.json")
        positions = config.get("max_position_embeddings")
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
        if not isinstance(positions, int) or not isinstance(factor, int | float):
            return None
        return int(positions * max(factor, 1))

    @cached_property
    def longest_token(self) -> int:
        """How many bytes of a text a token can stand for, at most."""
        longest = max(len(self.token_bytes(token)) for token in range(self.vocab_size))
        # A normalizer may shorten a text before it is split, as NFC does with accents.
        return longest * (4 if self._tokenizer.normalizer else 1)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of `token`. A character may span several tokens."""
        if token not in self._spelled:
            self._spelled[token] = self._spell(token)
        return self._spelled[token]

    def _spell(self, token: int) -> bytes:
        if added := self._added.get(token):
            return bytes(added.content, "utf-8")
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            return bytes(map(LETTER_BYTES.__getitem__, text))
        if len(text) == 6 and text.startswith("<0x"):  # SentencePiece's byte tokens
            return bytes([int(text[3:5], 16)])
        return bytes(text.replace("▁", " "), "utf-8")

    def is_special(self, token: int) -> bool:
        """Whether a token is no text of an answer."""
        return token in self._special

    @cached_property
    def end_pattern(self) -> re.Pattern[str]:
        """Matches the special tokens that may end a turn, the longest first.

        What follows one has the same tokens with and without the text before it.
        """
        # Only those of chat templates: some models have a thousand, and `re` tries each in turn.
        sources = "".join(self._template_sources.values())
        named = set(self.special_tokens.values())
        texts = {
            added.content
            for token in self._special
            if not ((added := self._added[token]).normalized or added.single_word)
            and (token in self.eos_ids or added.content in named or added.content in sources)
        }
        return re.compile("|".join(map(re.escape, sorted(texts, key=len)[::-1])) or "(?!)")

    @cached_property
    def digest(self) -> str:
        """Differs from that of every other tokenizer."""
        return hashlib.sha256((self._directory / TOKENIZER).read_bytes()).hexdigest()

    def text(self, ids: Iterable[int]) -> str:
        """The text of an answer: without special tokens, as engines decode it."""
        shown = [token for token in ids if not self.is_special(token)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

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
        template = self._template(tools=bool(tools))
        try:
            known = [_with_known_role(normalise(message), template) for message in messages]
        except (AttributeError, TypeError, ValueError) as error:  # parts of the wrong kind
            raise rejected(error) from error
        return template.render(
            {
                **self.special_tokens,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
                "messages": known,
                "tools": list(tools) if tools else None,
            }
        )

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template renders `tools`; many ignore them without an error."""
        with contextlib.suppress(BadRequest):
            return "probe" in self.render(_PROBE[:1], [_PROBE_TOOL])
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
        """The variables that the chat templates read, such as `enable_thinking`."""
        return frozenset().union(*(it.variables() for it in self._templates.values()))

    @property
    def template_source(self) -> str:
        """The source of the template for chats without tools, which is often the only one."""
        return self._template_sources[DEFAULT]

    @cached_property
    def _template_sources(self) -> dict[str, str]:
        return read_sources(self._directory, self._settings)

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        sources = self._template_sources.items()
        return {name: ChatTemplate(source, self._directory) for name, source in sources}

    def _template(self, *, tools: bool) -> ChatTemplate:
        # As transformers chooses: a template for tools may fail without them.
        return self._templates[TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT]

    @cached_property
    def _byte_level(self) -> bool:
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        kinds = [decoder, *decoder.get("decoders", [])]
        return any(kind.get("type") == "ByteLevel" for kind in kinds)

    def _eos_ids(self) -> Iterable[int]:
        for name in ("generation_config.json", "config.json"):
            given = _read_json(self._directory / name).get("eos_token_id")
            ids = given if isinstance(given, list) else [given] if given is not None else []
            for token in ids:
                if not isinstance(token, int) or not 0 <= token < 1 << 31:
                    path = self._directory / name
                    raise ModelError(
                        f"`{path}` has the `eos_token_id` `{token!s:.60}`, which is no token id",
                        hint=AGAIN,
                    )
                yield token
        for token in (self.special_tokens.get("eos_token"), *END_OF_TURN):
            if token and (number := self._tokenizer.token_to_id(token)) is not None:
                yield number


def _with_known_role(message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """OpenAI renamed the role `system` to `developer`; few chat templates know the new name."""
    if message.get("role") == "developer" and "developer" not in template.source:
        return {**message, "role": "system"}
    return message


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _read_tokenizer(path: Path) -> Any:
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # the library raises plain exceptions, and its panics are none
        raise ModelError(f"`{path}` is not a tokenizer: {one_line(exc)}", hint=AGAIN) from exc
    if not found.get_vocab_size(with_added_tokens=True):
        raise ModelError(f"`{path}` has no tokens", hint=AGAIN)
    return found


def _special_token(path: Path, name: str, settings: Mapping[str, Any]) -> str | None:
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ModelError(f"`{path}` has the `{name}` `{token!s:.60}`, which is no text", hint=AGAIN)
    return text
