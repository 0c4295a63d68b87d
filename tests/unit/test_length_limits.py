"""How many tokens a choice may have: by the request, by the model's setting, by the context."""

from pathlib import Path

import pytest

from trainer.config import LoraConfig
from trainer.engines.checks import token_limit
from trainer.engines.engine import SampleRequest
from trainer.errors import TooLong
from trainer.server.model import Model


def limit(*, prompt: int, max_tokens: int | None = None, max_seq_length: int | None = None) -> int:
    """The limit in an engine whose context has 100 tokens."""
    model = Model("p", "m", Path(), LoraConfig(), max_seq_length=max_seq_length)
    request = model.fit(SampleRequest([1] * prompt, max_tokens=max_tokens), 0)
    return token_limit(request, context=100, vocabulary=9)


@pytest.mark.parametrize(
    ("max_tokens", "max_seq_length", "expected"),
    [
        (None, None, 90),
        (None, 32768, 90),  # ART's default, above the context
        (None, 50, 40),
        (7, 32768, 7),
        (40, 50, 40),
    ],
)
def test_a_choice_ends_at_the_lowest_of_its_limits(
    max_tokens: int | None, max_seq_length: int | None, expected: int
) -> None:
    assert limit(prompt=10, max_tokens=max_tokens, max_seq_length=max_seq_length) == expected


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_seq_length", "name"),
    [
        (10, 41, 50, "`max_seq_length`"),
        (50, None, 50, "`max_seq_length`"),
        (10, 91, 32768, "maximum context length"),
        (100, None, 32768, "maximum context length"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    prompt: int, max_tokens: int | None, max_seq_length: int, name: str
) -> None:
    with pytest.raises(TooLong, match=name):
        limit(prompt=prompt, max_tokens=max_tokens, max_seq_length=max_seq_length)
