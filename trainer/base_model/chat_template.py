"""A model's chat template, run in jinja2's sandbox with bounds on its time and its output.

It has the names that templates use: `raise_exception`, `strftime_now`, `tojson`, and
`{% generation %}` blocks. Whatever goes wrong in a template is an error of the request, because a
template refuses messages by failing.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from trainer.base_model.json_files import AGAIN
from trainer.errors import BadRequest, ModelError

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as transformers has them
MAX_TEXT = 256 << 20  # characters; no context is that long
RENDER_WITHIN = 60.0  # seconds; a template that takes longer is in a loop
MAX_REPEATED = 1 << 20  # characters or items that `*` may make, and the largest exponent of `**`


class ChatTemplate:
    """A compiled template of the model in `directory`."""

    def __init__(self, source: str, directory: Path) -> None:
        self._environment = _environment()
        self.source = source
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"The chat template of `{directory}` is not valid: {one_line(error)}",
                hint="Fix `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`",
            ) from error

    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""
        parsed = self._environment.parse(self.source)
        return frozenset(jinja2.meta.find_undeclared_variables(parsed))

    def render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + RENDER_WITHIN
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT:
                    raise OverflowError(f"its output is longer than {MAX_TEXT} characters")
                if not len(pieces) % 64 and time.monotonic() > deadline:
                    raise TimeoutError(f"it takes longer than {RENDER_WITHIN:.0f} s")
        except Exception as error:  # a template may fail in any way that Python can
            raise rejected(error) from error
        return "".join(pieces)


def read_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The sources of a model's chat templates by name: `default`, and maybe `tool_use`.

    `settings` are those in `tokenizer_config.json`, whose template may be a list of named ones.
    """
    file = directory / "chat_template.jinja"
    named: dict[str, Any] = {}
    if file.is_file():
        named[DEFAULT] = _read(file)
        extra = directory / "additional_chat_templates" / f"{TOOL_USE}.jinja"
        if extra.is_file():
            named[TOOL_USE] = _read(extra)
    else:
        file = directory / "tokenizer_config.json"
        named[DEFAULT] = settings.get("chat_template")
    if isinstance(entries := named[DEFAULT], list):
        named = {str(it.get("name")): it.get("template") for it in entries if isinstance(it, dict)}
    found = {name: source for name in (DEFAULT, TOOL_USE) if (source := named.get(name))}
    if not all(isinstance(source, str) for source in found.values()):
        raise ModelError(f"The chat template in `{file}` is no text", hint=AGAIN)
    if not found:
        raise ModelError(
            f"`{directory}` has no chat template",
            hint="Use an instruct model, or add a `chat_template.jinja`",
        )
    # A model that has a template for tools alone uses it for every chat.
    return {DEFAULT: found.get(TOOL_USE, ""), **found}


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def rejected(error: Exception) -> BadRequest:
    """The error of messages that cannot be rendered."""
    return BadRequest(
        f"The model's chat template rejected these messages: {one_line(error)}",
        hint="Check the roles, their order, the tool calls and `chat_template_kwargs`",
    )


def one_line(error: BaseException) -> str:
    """The text of an error in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks an assistant's turn."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox in which no single operation makes a huge value."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        for value, other in ((left, right), (right, left)):
            repeats = isinstance(other, int) and isinstance(value, str | bytes | list | tuple)
            if repeats and len(value) * other > MAX_REPEATED:
                raise OverflowError(f"`*` would make more than {MAX_REPEATED} characters")
        if operator == "**" and abs(right) > MAX_REPEATED:
            raise OverflowError(f"`**` has an exponent above {MAX_REPEATED}")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
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
