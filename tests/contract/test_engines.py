"""Behaviour that the server relies on in every engine: one suite for all of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.loras import write_lora
from tests.contract.nodes import both_ready, head, node
from tests.serving import vllm_python
from trainer.base_model.resolve import resolve
from trainer.engines.choose import vllm_program
from trainer.engines.embedded import KEPT, EmbeddedEngine
from trainer.engines.engine import Delta, Engine, SampleRequest
from trainer.engines.vllm import VllmEngine
from trainer.errors import BadRequest, Conflict, NotFound, Unsupported, WorkerDied
from trainer.machines.replicas import Replicas

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
    with pytest.raises(BadRequest, match="do not fit the context of"):
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
