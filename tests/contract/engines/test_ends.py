"""What ends a choice, in every engine."""

from pathlib import Path

import pytest

from tests.contract.engines.choices import PROMPT, sample
from trainer.engines.engine import Engine
from trainer.errors import BadRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_choice_does_not_end_before_min_tokens(engine: Engine) -> None:
    biased = {"logit_bias": ((258, 20.0), (97, 19.0)), "seed": 5, "max_tokens": 30}
    (short,) = await sample(engine, **biased)
    assert short.finish_reason == "stop" and len(short.token_ids) < 12
    (longer,) = await sample(engine, min_tokens=12, **biased)
    assert set(longer.token_ids[:12]) == {97} and longer.token_ids[-1] == 258
    (stopped,) = await sample(engine, min_tokens=12, stop=("aaa",), **biased)
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == 13
    assert stopped.text == "a" * 10 if stopped.token_ids[-1] == 97 else "a" * 12


async def test_a_stop_token_ends_the_choice_and_is_not_in_its_text(engine: Engine) -> None:
    request = {"temperature": 0, "logit_bias": ((97, 50.0),), "frequency_penalty": 2.0}
    (free,) = await sample(engine, max_tokens=40, ignore_eos=True, **request)
    last = next(token for token in free.token_ids if token != 97)
    (stopped,) = await sample(engine, max_tokens=40, stop_token_ids=(last,), **request)
    assert stopped.finish_reason == "stop" and stopped.token_ids[-1] == last
    assert stopped.text == "a" * (len(stopped.token_ids) - 1)


async def test_an_ignored_end_of_turn_does_not_end_the_choice(engine: Engine) -> None:
    request = {"logit_bias": ((258, 100.0),), "max_tokens": 5, "seed": 1}
    (ended,) = await sample(engine, **request)
    assert (ended.token_ids, ended.finish_reason) == ([258], "stop")
    (ignored,) = await sample(engine, ignore_eos=True, **request)
    assert (ignored.token_ids, ignored.finish_reason) == ([258] * 5, "length")
    assert ignored.text == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_choice_and_is_not_in_its_text(
    engine: Engine, stream: bool
) -> None:
    request = {"seed": 11, "max_tokens": 64, "stream": stream}
    (free,) = await sample(engine, **request)
    # The first new character after the ninth.
    at = next(
        i for i, c in enumerate(free.text) if i > 8 and c.isascii() and c not in free.text[:i]
    )
    (stopped,) = await sample(engine, stop=("never sampled", free.text[at]), **request)
    assert stopped.text == free.text[:at]
    assert stopped.finish_reason == "stop"
    count = len(stopped.token_ids)
    assert stopped.token_ids == free.token_ids[:count] and count < len(free.token_ids)
    assert len(stopped.logprobs) == count


async def test_the_end_of_turn_is_a_token_without_text(engine: Engine, tmp_path: Path) -> None:
    for seed in range(400):
        (choice,) = await sample(engine, seed=seed, max_tokens=40, n=1)
        if choice.finish_reason == "stop":
            break
    assert choice.finish_reason == "stop" and choice.token_ids[-1] in (256, 258)
    assert "<|" not in choice.text


async def test_a_choice_ends_at_the_limit_of_the_context(engine: Engine) -> None:
    prompt = PROMPT * 84  # close to vLLM's `max_model_len` of 2,048
    (choice,) = await sample(engine, prompt_ids=prompt[:2040], seed=1, max_tokens=8)
    assert choice.token_ids
    with pytest.raises(BadRequest, match="maximum context length"):
        await sample(engine, prompt_ids=prompt[:2040], max_tokens=9000)
