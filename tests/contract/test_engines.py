"""Behaviour that the server relies on in every engine: one suite for all of them."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
import torch

from tests.contract.loras import write_lora
from tests.contract.nodes import both_ready, head, node
from tests.contract.schemas import random_schema
from tests.serving import vllm_python
from trainer.base_model.resolve import resolve
from trainer.engines.choose import vllm_program
from trainer.engines.embedded import KEPT, EmbeddedEngine
from trainer.engines.engine import Constraint, Delta, Engine, SampleRequest
from trainer.engines.vllm import VllmEngine
from trainer.errors import BadRequest, Conflict, NotFound, Unsupported, WorkerDied
from trainer.machines.replicas import Replicas
from trainer.policy.model import Policy, load_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Difference between two implementations of the same fp32 arithmetic: 24 tokens, 4 layers.
BOUND = 1e-4
PROMPT = [256, 257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]
PROMPTS = [PROMPT, [257, *b"user\nWhat is the capital of France?"], [*range(40, 120)], [7]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engines(
    tmp_path_factory: pytest.TempPathFactory, art_cache: str
) -> AsyncIterator[dict[str, Engine]]:
    directory = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        patch.setenv("OMP_NUM_THREADS", "1")
        model = resolve("tiny-random")
        embedded = EmbeddedEngine(model, log=directory / "embedded.log")
        vllm = VllmEngine(
            model,
            program=vllm_program(vllm_python()),
            log=directory / "vllm.log",
            rank=4,
            cuda=False,
            arguments={"max_model_len": 2048},
        )
        try:
            await asyncio.gather(embedded.start(), vllm.start())
            yield {"embedded": embedded, "vllm": vllm}
        finally:
            await asyncio.gather(embedded.stop(), vllm.stop())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replicas(
    tmp_path_factory: pytest.TempPathFactory, art_cache: str
) -> AsyncIterator[Replicas]:
    """Two embedded engines that act as one; the second runs in `trainer engine`."""
    directory = tmp_path_factory.mktemp("replicas")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        patch.setenv("OMP_NUM_THREADS", "1")
        async with head(directory) as replicas:
            with node(replicas, directory):
                await both_ready(replicas)
                yield replicas


@pytest.fixture(params=["embedded", "vllm", "replicas"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "replicas":
        return request.getfixturevalue("replicas")
    return request.getfixturevalue("engines")[request.param]


@pytest.fixture(params=["embedded", "vllm"])
def alone(engines: dict[str, Engine], request: pytest.FixtureRequest) -> Engine:
    """An engine without replicas; `test_replicas` covers those."""
    return engines[request.param]


async def test_few_loras_stay_in_memory_and_all_are_served(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    engine = engines["embedded"]
    assert isinstance(engine, EmbeddedEngine)
    names = [f"many@{seed}" for seed in range(KEPT + 2)]
    for seed, name in enumerate(names):
        await engine.load(name, write_lora(tmp_path / name, seed=seed))
    assert list(engine._loaded)[-KEPT:] == names[-KEPT:] and len(engine._loaded) == KEPT
    request_settings = {"temperature": 0, "max_tokens": 8}
    (first,), (last,) = [
        await sample(engine, lora=name, **request_settings) for name in (names[0], names[-1])
    ]
    assert first.logprobs != last.logprobs
    assert names[0] in engine._loaded and names[2] not in engine._loaded
    for name in names:
        await engine.unload(name)
    with pytest.raises(NotFound):
        await sample(engine, lora=names[0])


async def sample(engine: Engine, **request: Any) -> list[Delta]:
    """Return every choice as one delta."""
    choices: dict[int, Delta] = {}
    async for delta in engine.sample(SampleRequest(**{"prompt_ids": PROMPT, **request})):
        choices.setdefault(delta.index, Delta(delta.index)).extend(delta)
    return [choice for _, choice in sorted(choices.items())]


def differences(one: Delta, other: Delta) -> list[float]:
    return [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_both_engines_give_the_same_greedy_tokens_and_logprobs(
    engines: dict[str, Engine], prompt: list[int]
) -> None:
    request = {"prompt_ids": prompt, "temperature": 0, "max_tokens": 24}
    (ours,), (theirs,) = [await sample(engine, **request) for engine in engines.values()]
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text and ours.finish_reason == theirs.finish_reason
    assert max(differences(ours, theirs)) < BOUND


async def test_a_lora_changes_the_logprobs_alike_in_both_engines(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    path = write_lora(tmp_path / "0001", seed=1)
    request = {"temperature": 0, "max_tokens": 12}
    found = {}
    for name, engine in engines.items():
        (base,) = await sample(engine, **request)
        await engine.load("both@1", path)
        await engine.load("both@1", path)  # repeating it changes nothing
        (found[name],) = await sample(engine, lora="both@1", **request)
        assert abs(found[name].logprobs[0] - base.logprobs[0]) > 100 * BOUND
        (again,) = await sample(engine, **request)
        assert again.logprobs == pytest.approx(base.logprobs, abs=BOUND)
    assert found["embedded"].token_ids == found["vllm"].token_ids
    assert max(differences(found["embedded"], found["vllm"])) < BOUND


async def test_every_lora_stays_available_though_few_stay_loaded(
    engine: Engine, tmp_path: Path
) -> None:
    paths = [write_lora(tmp_path / f"{step:04}", seed=step) for step in range(8)]
    request = {"temperature": 0, "max_tokens": 2}
    first = []
    for step, path in enumerate(paths):
        await engine.load(f"many{engine.name}@{step}", path)
        first.append((await sample(engine, lora=f"many{engine.name}@{step}", **request))[0])
    assert len({choice.logprobs[0] for choice in first}) == 8
    for step in (0, 7, 3):
        (again,) = await sample(engine, lora=f"many{engine.name}@{step}", **request)
        assert again.logprobs == pytest.approx(first[step].logprobs, abs=BOUND)


async def test_a_lora_that_a_cancelled_request_loaded_is_used(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    engine = engines["vllm"]
    assert isinstance(engine, VllmEngine)
    await engine.load("held@1", write_lora(tmp_path / "held", seed=5))
    (before,) = await sample(engine, lora="held@1", temperature=0, max_tokens=8)
    del engine._loaded["held@1"]  # the state after a request is cancelled while it loads
    (after,) = await sample(engine, lora="held@1", temperature=0, max_tokens=8)
    assert after.token_ids == before.token_ids
    await engine.unload("held@1")


async def test_an_unknown_lora_is_rejected(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="`nope@3`"):
        await sample(engine, lora="nope@3", max_tokens=1)
    await engine.load("gone@1", write_lora(tmp_path / "0001", seed=2))
    await sample(engine, lora="gone@1", max_tokens=1)
    await engine.unload("gone@1")
    with pytest.raises(NotFound, match="`gone@1`"):
        await sample(engine, lora="gone@1", max_tokens=1)


async def test_the_same_seed_repeats_and_another_does_not(engine: Engine) -> None:
    runs = [await sample(engine, seed=seed, max_tokens=16, n=3) for seed in (5, 5, 6)]
    tokens = [[choice.token_ids for choice in run] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len({tuple(ids) for ids in tokens[0]}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_a_stream_adds_up_to_the_whole_completion(engine: Engine, temperature: float) -> None:
    request = {"temperature": temperature, "seed": 3, "max_tokens": 12, "n": 2}
    whole = await sample(engine, **request)
    pieces = [
        delta
        async for delta in engine.sample(SampleRequest(prompt_ids=PROMPT, stream=True, **request))
    ]
    assert len(pieces) > len(whole) == 2
    streamed = [Delta(0), Delta(1)]
    for piece in pieces:
        streamed[piece.index].extend(piece)
    for one, other in zip(whole, streamed, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert max(differences(one, other)) < BOUND


async def test_logprobs_are_the_policys_with_any_sampling_settings(engine: Engine) -> None:
    async def first_tokens(n: int, **settings: Any) -> dict[int, float]:
        choices = await sample(engine, n=n, seed=1, max_tokens=1, **settings)
        return {choice.token_ids[0]: choice.logprobs[0] for choice in choices}

    policy = await first_tokens(200)
    for settings in ({"temperature": 0.3}, {"temperature": 2.0}, {"top_p": 0.5}, {"top_k": 30}):
        drawn = await first_tokens(64, **settings)
        common = drawn.keys() & policy.keys()
        assert len(common) > 5
        assert all(abs(drawn[token] - policy[token]) < BOUND for token in common)


async def test_top_k_of_one_and_a_tiny_top_p_are_greedy(engine: Engine) -> None:
    (greedy,) = await sample(engine, temperature=0, max_tokens=6)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}):
        (drawn,) = await sample(engine, max_tokens=6, seed=1, **settings)
        assert drawn.token_ids == greedy.token_ids


async def test_penalties_bias_and_min_p_act_alike_in_both_engines(
    engines: dict[str, Engine],
) -> None:
    (plain,) = await sample(engines["embedded"], temperature=0, max_tokens=24)
    for settings in (
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"logit_bias": ((plain.token_ids[0], -100.0), (65, 3.0))},
        {"frequency_penalty": -0.5, "repetition_penalty": 0.7, "presence_penalty": 1.0},
    ):
        request = {"temperature": 0, "max_tokens": 24, **settings}
        (ours,), (theirs,) = [await sample(engine, **request) for engine in engines.values()]
        assert ours.token_ids == theirs.token_ids != plain.token_ids
        assert max(differences(ours, theirs)) < BOUND


async def test_the_logprobs_are_the_policys_own_under_every_setting(
    engine: Engine, policy: Policy
) -> None:
    schema = json.dumps({"enum": ["one", "two", "three hundred"]})
    for settings in (
        {"logit_bias": ((65, 50.0),), "frequency_penalty": 2.0, "repetition_penalty": 3.0},
        {"min_p": 0.5, "temperature": 2.0},
        {"min_tokens": 10},
        {"constraint": Constraint("json_schema", schema)},
        {"constraint": Constraint("regex", "[ab]{4}(c|dd)"), "temperature": 0},
        {"constraint": Constraint("json_schema", schema), "stream": True, "n": 2},
    ):
        for choice in await sample(engine, seed=4, max_tokens=20, top_logprobs=3, **settings):
            assert len(choice.token_ids) == len(choice.logprobs) == len(choice.top_logprobs) > 0
            own = own_logprobs(policy, PROMPT, choice.token_ids)
            taken = own[range(len(own)), choice.token_ids].tolist()
            assert choice.logprobs == pytest.approx(taken, abs=BOUND)
            for found, row in zip(choice.top_logprobs, own, strict=True):
                values = row.topk(3).values.tolist()
                assert [value for _, value in found] == pytest.approx(values, abs=BOUND)
                assert [float(row[token]) for token, _ in found] == pytest.approx(values, abs=BOUND)


@pytest.fixture(scope="module")
def policy() -> Policy:
    cpu = torch.device("cpu")
    return load_model(resolve("tiny-random"), lora=None, dtype=torch.float32, device=cpu)


@torch.no_grad()
def own_logprobs(policy: Policy, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return all logprobs [T, V] at the places of `tokens`, by the forward pass of training."""
    hidden = policy.hidden(torch.tensor([[*prompt, *tokens]]))
    return policy.logits(hidden)[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_logprobs_of_a_prompt_come_with_its_first_delta(
    engine: Engine, policy: Policy, stream: bool
) -> None:
    own = own_logprobs(policy, PROMPT[:1], PROMPT[1:])
    for settings in ({"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "top_logprobs": 2}):
        request = SampleRequest(PROMPT, n=2, prompt_logprobs=True, stream=stream, **settings)
        deltas = [delta async for delta in engine.sample(request)]
        for index in range(2):
            first, *later = [delta for delta in deltas if delta.index == index]
            assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
            assert first.prompt_logprobs[1:] == pytest.approx(
                own[range(len(own)), PROMPT[1:]].tolist(), abs=BOUND
            )
            assert all(delta.prompt_logprobs is None for delta in later)
            assert len(first.prompt_top_logprobs) == (
                len(PROMPT) if "top_logprobs" in settings else 0
            )
            for found, row in zip(first.prompt_top_logprobs[1:], own, strict=False):
                assert [value for _, value in found] == pytest.approx(
                    row.topk(2).values.tolist(), abs=BOUND
                )
            tokens = [token for delta in (first, *later) for token in delta.token_ids]
            assert len(tokens) <= settings["max_tokens"]


async def test_min_p_of_one_is_greedy(engine: Engine) -> None:
    (greedy,) = await sample(engine, temperature=0, max_tokens=6)
    (drawn,) = await sample(engine, min_p=1.0, max_tokens=6, seed=1)
    assert drawn.token_ids == greedy.token_ids


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


CONSTRAINTS = [
    (Constraint("regex", "(ab|c){2,3}!"), "(ab|c){2,3}!"),
    (Constraint("choice", json.dumps(["yes", 'no "sir"', "a|b"])), 'yes|no "sir"|a\\|b'),
    (
        Constraint("grammar", 'start: "<t>" %json{"type": "boolean"} "</t>"'),
        "<t>(true|false)</t>",
    ),
]


@pytest.mark.parametrize(
    ("constraint", "pattern"), CONSTRAINTS, ids=lambda one: getattr(one, "kind", "")
)
async def test_a_constrained_text_matches_and_ends_with_a_sampled_end_of_turn(
    engine: Engine, constraint: Constraint, pattern: str
) -> None:
    for choice in await sample(engine, constraint=constraint, n=4, seed=2, max_tokens=400):
        assert choice.finish_reason == "stop" and choice.token_ids[-1] == 258
        assert re.fullmatch(pattern, choice.text, re.DOTALL), choice.text
        assert bytes(choice.token_ids[:-1]).decode() == choice.text


async def test_any_json_object_is_one_without_a_schema(engine: Engine) -> None:
    (choice,) = await sample(
        engine, constraint=Constraint("json_object"), logit_bias=((125, 90.0),), max_tokens=9
    )
    assert (choice.text, choice.finish_reason) == ("{}", "stop")


async def test_both_engines_give_the_same_constrained_tokens(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    lora_path = write_lora(tmp_path / "0001", seed=6)
    for engine in engines.values():
        await engine.load("constrained@1", lora_path)
    for lora, (constraint, _) in zip((None, "constrained@1", None), CONSTRAINTS, strict=True):
        request = {"constraint": constraint, "lora": lora, "temperature": 0, "n": 2}
        ours, theirs = [await sample(engine, **request) for engine in engines.values()]
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
        assert max(differences(ours[0], theirs[0])) < BOUND


async def test_a_constrained_choice_that_reaches_its_limit_ends_there(engine: Engine) -> None:
    (choice,) = await sample(engine, constraint=Constraint("regex", "[ab]{50}"), max_tokens=7)
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == len(choice.logprobs) == len(choice.text) == 7


async def test_the_text_of_a_constrained_stream_arrives_piece_by_piece(engine: Engine) -> None:
    request = SampleRequest(
        PROMPT, constraint=Constraint("regex", "[ab]{20}"), stream=True, max_tokens=40
    )
    pieces = [delta.text async for delta in engine.sample(request)]
    assert len([piece for piece in pieces if piece]) > 10 and len("".join(pieces)) == 20


SCHEMAS = int(os.environ.get("SCHEMAS", "200"))


async def test_every_answer_to_a_random_schema_is_valid(alone: Engine) -> None:
    schemas = [random_schema(seed) for seed in range(SCHEMAS)]
    found = await asyncio.gather(
        *(
            sample(
                alone,
                constraint=Constraint("json_schema", json.dumps(schema)),
                max_tokens=500,
                seed=seed,
            )
            for seed, schema in enumerate(schemas)
        )
    )
    finished = [
        (schema, choice)
        for schema, (choice,) in zip(schemas, found, strict=True)
        if choice.finish_reason == "stop"
    ]
    assert len(finished) > 0.95 * SCHEMAS
    formats = jsonschema.FormatChecker(["uuid", "ipv4"])
    for schema, choice in finished:
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        validator.validate(json.loads(choice.text))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json_schema", '{"type": "obj"}'), "JSON schema .*Invalid type: obj"),
        (Constraint("json_schema", '{"$ref": "#/$defs/no"}'), "JSON schema .*/\\$defs/no"),
        (Constraint("json_schema", '{"uniqueItems": true}'), "JSON schema .*uniqueItems"),
        (Constraint("json_schema", "[1"), "JSON schema .*not JSON"),
        (Constraint("json_schema", "false"), "JSON schema .*must be an object"),
        (Constraint("regex", "(["), "regular expression .*unclosed"),
        (Constraint("regex", "a(?=b)"), "regular expression .*look-around"),
        (Constraint("choice", "[]"), "choices .*one or more strings"),
        (Constraint("grammar", "start: nowhere"), "grammar .*nowhere"),
    ],
    ids=lambda one: getattr(one, "value", ""),
)
async def test_a_constraint_that_cannot_be_used_is_rejected_in_one_sentence(
    engine: Engine, constraint: Constraint, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        await sample(engine, constraint=constraint, max_tokens=5)
    assert "\n" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 1.5},
        {"frequency_penalty": 3.0},
        {"presence_penalty": -3.0},
        {"repetition_penalty": 0.0},
        {"top_logprobs": 21},
        {"logit_bias": ((9999, 1.0),)},
        {"logit_bias": ((7, 101.0),)},
        {"stop_token_ids": (9999,)},
        {"min_tokens": 9},
        {"max_tokens": 0},
        {"ignore_eos": True, "constraint": Constraint("json_object")},
        {"min_tokens": 2, "constraint": Constraint("json_object")},
    ],
    ids=lambda settings: "-".join(settings),
)
async def test_a_setting_out_of_range_is_rejected_by_name(
    engine: Engine, settings: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest, match=f"`{next(iter(settings))}`"):
        await sample(engine, **{"max_tokens": 8, **settings})


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


async def test_concurrent_requests_give_the_same_as_each_alone(engine: Engine) -> None:
    requests = [
        {"prompt_ids": PROMPTS[i % 4], "seed": i, "max_tokens": 6 + i, "temperature": 0.9}
        for i in range(12)
    ]
    together = await asyncio.gather(*(sample(engine, **request) for request in requests))
    for request, (choice,) in zip(requests[::4], together[::4], strict=True):
        (alone,) = await sample(engine, **request)
        assert alone.token_ids == choice.token_ids
        assert max(differences(alone, choice)) < BOUND


async def test_closing_a_request_early_cancels_it(engine: Engine) -> None:
    request = SampleRequest(prompt_ids=PROMPT, n=16, max_tokens=1500, stream=True)
    async with aclosing(engine.sample(request)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            break
    task = asyncio.create_task(sample(engine, n=64, max_tokens=1500))
    await asyncio.sleep(0.02)  # started, and far from its end: a random model stops by chance
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await idle(engine)


async def idle(engine: Engine) -> bool:
    """Return whether nothing is being sampled: by vLLM's metrics, or by a quick reply."""
    if not isinstance(engine, VllmEngine):
        return bool(await sample(engine, max_tokens=1))
    for _ in range(600):
        metrics = (await engine._process._client.get("/metrics")).text
        running = [line for line in metrics.splitlines() if "num_requests_running{" in line]
        if running and all(line.endswith(" 0.0") for line in running):
            return True
        await asyncio.sleep(0.1)
    return False


async def test_vllm_rejects_by_name_settings_that_would_break_the_server(
    engines: dict[str, Engine],
) -> None:
    for name in ("host", "port", "api_key", "enable_lora", "logprobs_mode", "served_model_name"):
        with pytest.raises(Unsupported, match=rf"`engine_args\.{name}`"):
            await engines["vllm"].configure({name: "x"})
    with pytest.raises(Conflict, match=r"`engine_args\.max_model_len` is `2048` here"):
        await engines["vllm"].configure({"max_model_len": 4096})


async def test_vllm_does_not_restart_for_values_it_already_has(
    engines: dict[str, Engine],
) -> None:
    engine = engines["vllm"]
    assert isinstance(engine, VllmEngine)
    running = engine._process
    arguments = {"max_model_len": 2048, "enforce_eager": True, "tensor_parallel_size": 1}
    await engine.configure(arguments)
    assert engine._process is running


async def test_a_dead_engine_is_reported_and_restarts_with_its_loras(
    alone: Engine, tmp_path: Path
) -> None:
    engine = alone
    path = write_lora(tmp_path / "0001", seed=3)
    request = {"lora": f"lives{engine.name}@1", "temperature": 0, "max_tokens": 4}
    await engine.load(request["lora"], path)
    (before,) = await sample(engine, **request)
    victim = process_of(engine)
    long = asyncio.create_task(sample(engine, max_tokens=1900, n=64))
    await asyncio.sleep(0.05)  # started, and far from its end: a random model stops by chance
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"(The engine|vLLM).*killed"):
        await long
    await engine.load(request["lora"], path)
    (after,) = await sample(engine, **request)
    assert after.token_ids == before.token_ids
    assert max(differences(before, after)) < BOUND


def process_of(engine: Engine) -> int:
    """Return the process that samples; for vLLM its engine core, which its API briefly survives."""
    worker = engine._worker if isinstance(engine, EmbeddedEngine) else engine._process._process  # type: ignore[attr-defined]
    pid = int(worker.pid)
    while isinstance(engine, VllmEngine):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        named = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
        core = next((child for name, child in named.items() if "EngineCor" in name), None)
        if core:
            return core
        pid = int(children[0])
    return pid


async def test_a_vllm_that_cannot_start_reports_why(tmp_path: Path) -> None:
    engine = VllmEngine(
        resolve("tiny-random"),
        program=vllm_program(vllm_python()),
        log=tmp_path / "vllm.log",
        rank=4,
        cuda=False,
        arguments={"no_such_setting": 1},
    )
    with pytest.raises(WorkerDied, match="unrecognized arguments: --no-such-setting") as caught:
        await engine.start()
    assert "`engine_args`" in caught.value.hint and str(tmp_path / "vllm.log") in caught.value.hint
    assert not engine.running
