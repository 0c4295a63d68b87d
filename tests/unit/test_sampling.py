import math
import random

import pytest
import torch

from trainer.engines.engine import Constraint, SampleRequest
from trainer.engines.rules import Rules
from trainer.engines.sampling import Sampling, choose

LOGITS = torch.tensor([[0.0, math.log(2), math.log(5)]])  # probabilities 1/8, 2/8, 5/8


def draw(sampling: Sampling, uniform: float) -> int:
    return choose(LOGITS, [sampling], [uniform])[0][0]


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    shares = [draw(Sampling(), (i + 0.5) / 800) for i in range(800)]
    assert [shares.count(token) for token in range(3)] == [100, 200, 500]


def test_the_logprob_is_the_policys_at_any_temperature() -> None:
    for sampling in (Sampling(), Sampling(temperature=0.3), Sampling(top_k=1), Sampling(top_p=0.1)):
        (token,), (logprob,) = choose(LOGITS, [sampling], [0.99])
        assert token == 2
        assert math.isclose(logprob, math.log(5 / 8), rel_tol=1e-6)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert {draw(Sampling(temperature=0), u / 10) for u in range(10)} == {2}


def test_top_p_keeps_the_smallest_set_that_fills_it_and_top_k_the_k_likeliest() -> None:
    uniforms = [u / 100 for u in range(100)]
    assert {draw(Sampling(top_p=0.6), u) for u in uniforms} == {2}
    assert {draw(Sampling(top_p=0.7), u) for u in uniforms} == {1, 2}
    assert {draw(Sampling(top_p=1e-50), u) for u in uniforms} == {2}  # rounds to zero in float32
    assert {draw(Sampling(top_k=2), u) for u in uniforms} == {1, 2}


def test_each_row_has_its_own_sampling_settings() -> None:
    logits = LOGITS.repeat(3, 1)
    samplings = [Sampling(), Sampling(temperature=0), Sampling(top_k=2)]
    assert choose(logits, samplings, [0.0, 0.0, 0.0])[0] == [0, 2, 1]


def test_an_impossible_token_is_never_drawn_and_its_logprob_is_finite() -> None:
    logits = torch.tensor([[float("-inf"), 0.0]])
    tokens, logprobs = choose(logits, [Sampling()], [0.0])
    assert tokens == [1] and logprobs == [0.0]


def test_a_large_vocabulary_is_sampled_in_proportion_too() -> None:
    weights = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0))
    weights[:, 300:700] = 0  # impossible tokens: one whole block, and parts of two others
    borders = weights.double().cumsum(-1)[0] / weights.double().sum()
    for number in range(500):
        uniform = (number + 0.5) / 500
        (token,), _ = choose(weights.log(), [Sampling()], [uniform])
        assert weights[0, token] > 0
        # A border may round to its neighbour.
        assert abs(token - int(torch.searchsorted(borders, uniform))) <= 1


def test_the_largest_uniform_draws_the_last_possible_token() -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[:, 255:257] = 0.0
    assert choose(logits, [Sampling()], [1 - 2**-53])[0] == [256]


def test_min_p_keeps_tokens_relative_to_the_likeliest_after_temperature() -> None:
    uniforms = [u / 100 for u in range(100)]
    assert {draw(Sampling(min_p=0.41), u) for u in uniforms} == {2}
    assert {draw(Sampling(min_p=0.39), u) for u in uniforms} == {1, 2}
    assert {draw(Sampling(min_p=0.41, temperature=2.0), u) for u in uniforms} == {0, 1, 2}


def test_changed_logits_choose_the_token_and_the_policys_give_its_logprob() -> None:
    logits = torch.tensor([[0.0, -150.0, -200.0], [1.0, 2.0, 3.0]])
    changed = {0: torch.tensor([-torch.inf, -torch.inf, 5.0])}
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_p=0.3)):
        tokens, logprobs = choose(logits, [sampling, Sampling(temperature=0)], [0.5, 0.5], changed)
        assert tokens == [2, 2]
        assert logprobs[0] == -200.0  # its probability rounds to zero, its logprob does not
        assert math.isclose(logprobs[1], 3 - math.log(sum(map(math.exp, (1, 2, 3)))), rel_tol=1e-6)


def by_the_book(logits: list[float], request: SampleRequest, output: list[int]) -> list[float]:
    """vLLM's order and formulas, one token at a time."""
    result = []
    for token, value in enumerate(logits):
        if token in (1, 4) and len(output) < request.min_tokens:
            value = -math.inf
        value += dict(request.logit_bias).get(token, 0.0)
        if token in request.prompt_ids or token in output:
            value = (
                value / request.repetition_penalty
                if value > 0
                else value * request.repetition_penalty
            )
        value -= request.frequency_penalty * output.count(token)
        value -= request.presence_penalty * (token in output)
        result.append(value)
    return result


def test_rules_change_the_logits_by_the_book() -> None:
    chance = random.Random(0)
    for _ in range(50):
        request = SampleRequest(
            [chance.randrange(8) for _ in range(3)],
            frequency_penalty=chance.uniform(-2, 2),
            presence_penalty=chance.uniform(-2, 2),
            repetition_penalty=chance.uniform(0.5, 2),
            logit_bias=tuple((t, chance.uniform(-9, 9)) for t in chance.sample(range(8), 3)),
            min_tokens=chance.randrange(6),
        )
        output = [chance.randrange(8) for _ in range(chance.randrange(6))]
        logits = [chance.uniform(-3, 3) for _ in range(8)]
        before = torch.tensor(logits)
        found = Rules(request, frozenset({1, 4})).apply(before, output).tolist()
        assert found == pytest.approx(by_the_book(logits, request, output), abs=1e-5)
        assert before.tolist() == pytest.approx(logits)  # not changed in place


def test_a_plain_request_needs_no_rules() -> None:
    assert not Rules.needed(SampleRequest([1], temperature=0.3, top_p=0.5, top_k=4, min_p=0.1))
    assert Rules.needed(SampleRequest([1], min_tokens=1))
    assert Rules.needed(SampleRequest([1], constraint=Constraint("json_object")))
