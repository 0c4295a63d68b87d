"""Callers that find vLLM dead at the same moment start it once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base_model.resolve import resolve
from trainer.engines.vllm import VllmEngine


async def test_a_dead_vllm_is_started_once_for_all_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = VllmEngine(
        resolve("tiny-random"), program=[], log=tmp_path / "log", rank=8, cuda=False, arguments={}
    )
    starts = []

    async def start() -> None:
        starts.append(engine)
        await asyncio.sleep(0)  # the others come while it starts
        engine._process = SimpleNamespace(running=True)

    monkeypatch.setattr(engine, "_start", start)
    await asyncio.gather(*(engine.start() for _ in range(3)))
    assert len(starts) == 1
