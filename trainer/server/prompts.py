"""Bounds on prompts, checked before they are tokenized, and work on long ones in a thread.

A text of megabytes takes the tokenizer seconds. Whatever cannot fit the context is refused before,
and the rest of a long prompt is read in a thread, so that other requests are answered meanwhile.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import TooLong

T = TypeVar("T")
LARGE = 1 << 14  # characters and values in a request, beyond which a thread reads it


async def prepare(work: Callable[[], T], *parts: Any) -> T:
    """Return the result of `work` on `parts` of a request, from a thread if they are large."""
    return await asyncio.to_thread(work) if is_large(parts) else work()


def is_large(value: Any) -> bool:
    """Whether JSON holds more than `LARGE` characters and values. It stops counting there."""
    left, waiting = LARGE, [value]
    while waiting:
        part = waiting.pop()
        left -= 1 + (len(part) if isinstance(part, str | list | tuple | dict) else 0)
        if left < 0:
            return True
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return False


def check_count(messages: Sequence[Any], tokenizer: Tokenizer) -> None:
    """Refuse more messages than tokens fit: each takes one at least."""
    _check(len(messages), "messages", len(messages), tokenizer)


def check_size(text: str, tokenizer: Tokenizer) -> None:
    """Refuse a text that is certainly too long, without tokenizing it."""
    if len(text) > tokenizer.longest_token:
        size = len(text.encode())
        _check(size // tokenizer.longest_token, "bytes", size, tokenizer)


def encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a plain prompt, or the error that it is too long."""
    check_size(text, tokenizer)
    ids = tokenizer.encode(text)
    check_tokens(ids, tokenizer)
    return ids


def check_tokens(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    _check(len(ids), "tokens", len(ids), tokenizer)


def _check(tokens: int, unit: str, count: int, tokenizer: Tokenizer) -> None:
    if tokenizer.context is not None and tokens > tokenizer.context:
        # Agents tell this error from others by these words of OpenAI and vLLM.
        raise TooLong(
            f"The prompt of {count} {unit} does not fit: "
            f"this model's maximum context length is {tokenizer.context} tokens"
        )
