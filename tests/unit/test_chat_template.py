"""Whatever a chat template does, the client reads one sentence."""

from pathlib import Path
from typing import Any

import pytest

from trainer.base_model import chat_template
from trainer.base_model.chat_template import ChatTemplate
from trainer.errors import BadRequest, ModelError

FAULTS = {
    "{{ 1 // zero }}": {"zero": 0},
    "{{ messages[3].content.x }}": {"messages": []},
    "{{ text[9] ~ text.upper(1) }}": {"text": "a"},
    "{{ '%d' % text }}": {"text": "a"},
    "{{ '%*d' % (width, 1) }}{{ width * 'ab' }}": {"width": 10**6},
    "{{ 'ab' * width }}": {"width": 10**12},
    "{{ 10 ** width }}": {"width": 10**12},
    "{% for _ in range(width) %}a{% endfor %}": {"width": 10**9},
    "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}": {},
    "{{ text.__class__.__mro__ }}": {"text": "a"},
    "{{ raise_exception('roles must alternate') }}": {},
    "{{ text.encode('nothing') }}": {"text": "a"},
    "{{ text | tojson }}": {"text": {1, 2}},
    "{{ text() }}": {"text": "a"},
    "{% include text %}": {"text": "a"},
    "{{ strftime_now(text) }}": {"text": 5},
}


@pytest.mark.parametrize("source", FAULTS)
def test_a_template_that_fails_is_the_requests_fault(source: str) -> None:
    with pytest.raises(BadRequest, match=r"chat template rejected these messages: .") as caught:
        ChatTemplate(source, Path("model")).render(FAULTS[source])
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


@pytest.mark.parametrize("bound", [("MAX_TEXT", 100_000), ("RENDER_WITHIN", 0.05)])
def test_a_template_that_goes_on_and_on_is_stopped(
    bound: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, *bound)
    source = "{% for a in range(90000) %}{% for b in range(90000) %}ab{% endfor %}{% endfor %}"
    with pytest.raises(BadRequest, match="longer than"):
        ChatTemplate(source, Path("model")).render({})


def test_a_template_with_a_fault_in_it_is_named_with_its_model() -> None:
    with pytest.raises(ModelError, match="chat template of `model` is not valid: Unexpected end"):
        ChatTemplate("{% if messages %}", Path("model"))
