"""Ollama's `Modelfile`: the GGUF file, the chat template in Go's language, and the stop tokens.

A chat template cannot be translated in general. The usual ones write each message between two fixed
texts, which are found by rendering messages with known contents. The texts must then render whole
conversations as the original does; otherwise the file has no `TEMPLATE`.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest, ModelError

Messages = list[dict[str, Any]]
# Private characters, which no template writes.
_SYSTEM, _USER, _ANSWER, _RESULT = (f"\ue000{name}\ue001" for name in ("s", "u", "a", "r"))
_NAME, _ARGUMENTS = "\ue000name\ue001", {"question": "Why?"}
_TOOLS: Messages = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("first", "second")
]


@dataclass(frozen=True)
class Turns:
    """A chat template as fixed texts."""

    opening: str
    """Text before the first message of a conversation without a system message."""
    around: dict[str, tuple[str, str]]
    """Texts before and after a message, by role; the system message is the first."""
    reply: str
    """Text that begins the assistant's answer."""
    opening_tools: tuple[str, str, str] = ("", "", "")
    """The opening with tools: before the first, between two, after the last."""
    system_tools: tuple[str, str, str] | None = None
    """The same after a system message; None if the template shows no tools."""
    calls: tuple[str, str, str, str, str] = ("", "", "", "", "")
    """Before the first call of an empty answer and of one with text, after the name of a call,
    between two, after the last."""

    def render(self, messages: Messages) -> str:
        """Render a conversation without tools, as `template` does in Ollama."""
        text = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            text += message["content"].join(self.around[message["role"]])
        return text + self.reply

    def template(self) -> str:
        """The template in Go's language, with Ollama's names."""
        before, after = self.around["system"]
        opening, ending, answer = self.opening, after, "{{ .Content }}"
        if self.system_tools:
            opening = f"{_go_tools(self.opening_tools)}{{{{ else }}}}{opening}{{{{ end }}}}"
            ending = f"{_go_tools(self.system_tools)}{{{{ else }}}}{after}{{{{ end }}}}"
            empty, text, middle, between, last = self.calls
            first = f"{{{{ if $call.Content }}}}{text}{{{{ else }}}}{empty}{{{{ end }}}}"
            answer += (
                "{{ if .ToolCalls }}{{ $call := . }}{{ range $i, $c := .ToolCalls }}"
                f"{{{{ if $i }}}}{between}{{{{ else }}}}{first}{{{{ end }}}}"
                f"{{{{ $c.Function.Name }}}}{middle}{{{{ $c.Function.Arguments }}}}"
                f"{{{{ end }}}}{last}{{{{ end }}}}"
            )
        roles = f'{{{{ if eq .Role "system" }}}}{before}{{{{ .Content }}}}{ending}'
        for role, (before, after) in self.around.items():
            if role != "system":
                content = answer if role == "assistant" else "{{ .Content }}"
                roles += f'{{{{ else if eq .Role "{role}" }}}}{before}{content}{after}'
        return (
            f"{{{{ if not .System }}}}{opening}{{{{ end }}}}"
            f"{{{{ range .Messages }}}}{roles}{{{{ end }}}}{{{{ end }}}}{self.reply}"
        )

    def texts(self) -> list[str]:
        pairs = [text for pair in self.around.values() for text in pair]
        tools = [*self.opening_tools, *(self.system_tools or ()), *self.calls]
        return [self.opening, self.reply, *pairs, *tools]


def write_modelfile(path: Path, model: str, directory: Path, *, adds_bos: bool) -> None:
    """Write the Modelfile of the GGUF file `model`; `directory` has its tokenizer.

    With `adds_bos` the engine starts each text with the BOS token, so the template must not.
    """
    tokenizer = Tokenizer(directory)
    lines = [f"FROM ./{model}"]
    turns = find_turns(tokenizer)
    if turns is None:
        lines.append("# Ollama chooses a template: this model's cannot be written in its language.")
    else:
        template = turns.template()
        if adds_bos:
            template = template.replace(tokenizer.special_tokens["bos_token"], "")
        lines.append(f'TEMPLATE """{template}"""')
    for token in sorted(tokenizer.eos_ids):
        lines.append(f"PARAMETER stop {json.dumps(tokenizer.decode([token]), ensure_ascii=False)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_turns(tokenizer: Tokenizer) -> Turns | None:
    """The chat template as fixed texts, or None if it is not of that kind."""
    try:
        turns = _derive(tokenizer)
        if not _is_faithful(turns, tokenizer):
            return None
        if tokenizer.shows_tools and tokenizer.shows_tool_calls:
            turns = _with_tools(turns, tokenizer)
    except (BadRequest, ModelError, ValueError):
        return None
    # Two braces are code in Go, and three quotes end the text.
    code = any(bad in text for text in turns.texts() for bad in ("{{", '"""'))
    return None if code else turns


def _derive(tokenizer: Tokenizer) -> Turns:
    user, answer = _message("user", _USER), _message("assistant", _ANSWER)
    chat = [_message("system", _SYSTEM), user, answer, user]
    ended = tokenizer.render(chat, add_generation_prompt=False)
    first, second, third, fourth, user_end = _pieces(ended, [_SYSTEM, _USER, _ANSWER, _USER])
    reply = _without(tokenizer.render(chat), start=ended)
    answered = tokenizer.render([user, answer], add_generation_prompt=False)
    alone, _, answer_end = _pieces(answered, [_USER, _ANSWER])
    user_start = _without(fourth, start=answer_end)
    return Turns(
        opening=_without(alone, end=user_start),
        around={
            "system": (first, _without(second, end=user_start)),
            "user": (user_start, user_end),
            "assistant": (_without(third, start=user_end), answer_end),
        },
        reply=reply,
    )


def _with_tools(turns: Turns, tokenizer: Tokenizer) -> Turns:
    """Add the texts around tools, calls and their results."""
    user_start, user_end = turns.around["user"]
    answer_start, answer_end = turns.around["assistant"]
    system, user = _message("system", _SYSTEM), _message("user", _USER)
    shown = [json.dumps(tool) for tool in _TOOLS]
    opening = _pieces(tokenizer.render([user], _TOOLS), [*shown, _USER])[:3]
    found = _pieces(tokenizer.render([system, user], _TOOLS), [_SYSTEM, *shown, _USER])
    if found[0] != turns.around["system"][0]:
        raise ValueError("the system message has another beginning with tools")
    call = {"id": "call00000", "type": "function"}
    call |= {"function": {"name": _NAME, "arguments": _ARGUMENTS}}  # type: ignore[dict-item]
    arguments = json.dumps(_ARGUMENTS)

    def call_texts(content: str) -> list[str]:
        """The texts around two calls after an answer's `content`."""
        message = {**_message("assistant", content), "tool_calls": [call, call]}
        text = tokenizer.render([user, message], _TOOLS, add_generation_prompt=False)
        text = _without(_pieces(text, [_USER])[1], start=user_end + answer_start + content)
        return _pieces(_without(text, end=answer_end), [_NAME, arguments] * 2)

    empty, after_text = call_texts(""), call_texts(_ANSWER)
    result = {"role": "tool", "tool_call_id": "call00000", "name": _NAME, "content": _RESULT}
    message = {**_message("assistant", ""), "tool_calls": [call]}
    text = tokenizer.render([user, message, result], _TOOLS, add_generation_prompt=False)
    before, result_end = _pieces(_pieces(text, [arguments])[1], [_RESULT])
    return replace(
        turns,
        opening_tools=(opening[0], opening[1], _without(opening[2], end=user_start)),
        system_tools=(found[1], found[2], _without(found[3], end=user_start)),
        calls=(empty[0], after_text[0], empty[1], empty[2], empty[4]),
        around={
            **turns.around,
            "tool": (_without(before, start=empty[4] + answer_end), result_end),
        },
    )


def _is_faithful(turns: Turns, tokenizer: Tokenizer) -> bool:
    for chat in ("user", "system user", "user assistant user", "system user assistant user"):
        messages = [_message(role, f"{role} {at}\nsays.") for at, role in enumerate(chat.split())]
        if turns.render(messages) != tokenizer.render(messages):
            return False
    return True


def _pieces(text: str, marks: list[str]) -> list[str]:
    """The pieces of `text` between `marks`, which must occur in their order."""
    pieces = []
    for mark in marks:
        piece, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"the template does not write `{mark}`")
        pieces.append(piece)
    return [*pieces, text]


def _without(text: str, *, start: str = "", end: str = "") -> str:
    """`text` without its `start` and `end`, which it must have."""
    if not (text.startswith(start) and text.endswith(end) and len(text) >= len(start + end)):
        raise ValueError(f"the template does not write `{start or end}` every time")
    return text[len(start) : len(text) - len(end)]


def _go_tools(texts: tuple[str, str, str]) -> str:
    first, between, last = texts
    each = f"{{{{ range $i, $t := $.Tools }}}}{{{{ if $i }}}}{between}{{{{ end }}}}{{{{ $t }}}}"
    return f"{{{{ if $.Tools }}}}{first}{each}{{{{ end }}}}{last}"


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
