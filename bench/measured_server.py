"""`trainer serve` for `bench/overlap.py`: writes when its engine and its learner were busy."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.learner.process import LearnerProcess

RECORDED = 16  # answers that the replayed engine takes from the real one


class Busy:
    """Appends the time of each request and step to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._file.write(json.dumps([kind, started, time.monotonic()]) + "\n")


class MeasuredEngine:
    """The real engine, or one that replays its first answers at `rate` tokens per second.

    Requests of `tokens` tokens are the agent's; the server's own always reach the real engine.
    """

    def __init__(self, inner: Any, busy: Busy, rate: float | None, tokens: int) -> None:
        self._inner = inner
        self._busy = busy
        self._rate = rate
        self._tokens = tokens
        self._answers: list[list[Any]] = []
        self._replayed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def sample(self, request: Any) -> AsyncIterator[Any]:
        with self._busy.measured("engine"):
            replays = self._rate is not None and request.max_tokens == self._tokens
            if not replays or len(self._answers) < RECORDED:
                answer = []
                async for delta in self._inner.sample(request):
                    answer.append(delta)
                    yield delta
                if replays:
                    self._answers.append(answer)
                return
            answer = self._answers[self._replayed % RECORDED]
            self._replayed += 1
            assert self._rate is not None
            await asyncio.sleep(sum(len(delta.token_ids) for delta in answer) / self._rate)
            for delta in answer:
                yield delta


def serve(arguments: argparse.Namespace) -> None:
    """Run `trainer serve` with a measured engine and learner."""
    from trainer.config import LoraConfig, ServerConfig
    from trainer.server.app import serve

    busy = Busy(arguments.busy)
    train_step = LearnerProcess.train

    async def measured(self: Any, *given: Any, **named: Any) -> AsyncIterator[Any]:
        due = time.monotonic() + arguments.learner_s
        with busy.measured("learner"):
            async for row in train_step(self, *given, **named):
                if "checkpoint" in row:
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                yield row

    LearnerProcess.train = measured  # type: ignore[assignment,method-assign]
    kind, *settings = arguments.serve.split("+")
    rate = arguments.rate if kind == "replay" else None
    config = ServerConfig(
        base_model=arguments.base_model,
        engine="vllm" if kind == "vllm" else "embedded",
        vllm=os.environ.get("ART_VLLM"),
        engine_args=arguments.engine_args,
        mps="mps" in settings,
        quantization="fp8" if "fp8" in settings else None,
        lora=LoraConfig(rank=arguments.rank, alpha=2.0 * arguments.rank),
        port=arguments.port,
        openai_port=arguments.openai_port,
        state_dir=str(arguments.state_dir),
    )
    serve(config, wrap_engine=lambda inner, _: MeasuredEngine(inner, busy, rate, arguments.tokens))  # type: ignore[arg-type,return-value]
