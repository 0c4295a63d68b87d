"""LoRAs are loaded, kept and served alike by every engine."""

import asyncio
from pathlib import Path

import pytest

from tests.contract.engines.choices import BOUND, differences, sample
from tests.contract.loras import write_lora
from trainer.engines.embedded import KEPT, EmbeddedEngine
from trainer.engines.engine import Engine
from trainer.engines.vllm import VllmEngine
from trainer.errors import NotFound

pytestmark = pytest.mark.asyncio(loop_scope="session")


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


async def test_the_base_model_beside_loras_is_the_base_model(
    engine: Engine, tmp_path: Path
) -> None:
    for step in (1, 2):
        await engine.load(f"beside@{step}", write_lora(tmp_path / str(step), seed=step))
    request = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    names = [None, "beside@1", "beside@2"]
    alone = [(await sample(engine, lora=name, **request))[0] for name in names]
    together = await asyncio.gather(*(sample(engine, lora=name, **request) for name in names * 2))
    for expected, (found,) in zip(alone * 2, together, strict=True):
        assert found.token_ids == expected.token_ids
        assert max(differences(found, expected)) < BOUND


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
