"""Warnings about parts of a request that the model's chat template leaves out.

Many templates ignore tools or past tool calls without an error. Rendering a probe shows it. The
client then gets a warning in its answer, and the log has it once.
"""

import functools
import logging
from collections.abc import Sequence

from kit.types import Json
from trainer.base_model.messages import Message
from trainer.base_model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
HEADER = "x-art-warning"


def reasoning_variables(tokenizer: Tokenizer, effort: str | None) -> Json:
    """The template's variables for `reasoning_effort`: its own, or a switch for thinking."""
    if effort is None:
        return {}
    if "reasoning_effort" in tokenizer.template_variables:
        return {"reasoning_effort": effort}
    for switch in ("enable_thinking", "thinking"):
        if switch in tokenizer.template_variables:
            return {switch: effort != "none"}
    return {}


def warnings_about(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    effort: str | None,
) -> list[str]:
    """One sentence for each part of a request that the model does not see."""
    found = []
    if tools and not tokenizer.shows_tools:
        found.append("The model's chat template ignores `tools`, so the model does not see them")
    if not tokenizer.shows_tool_calls and any(
        message.get("tool_calls") or message.get("role") == "tool" for message in messages
    ):
        found.append("The model's chat template ignores past tool calls or their results")
    if effort not in (None, "none") and not reasoning_variables(tokenizer, effort):
        found.append("The model's chat template has no `reasoning_effort`, so it changes nothing")
    for warning in found:
        _log_once(warning)
    return found


@functools.cache
def _log_once(warning: str) -> None:
    logger.warning("%s; put another `chat_template.jinja` into the model's directory", warning)
