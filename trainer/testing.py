"""A fake for testing agents: an engine that replies from a script.

    python -m trainer.testing script.json --port 7999 --openai-port 8000

runs `trainer serve` with this engine. A small model cannot call tools; with a script, an agent
that needs tool calls can still be tested and trained. The learner and everything else are real.
"""

import argparse
import asyncio
import itertools
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.constraints import Grammars
from trainer.engines.engine import Delta, Engine, SampleRequest

PIECE = 8  # tokens in one delta of a stream


@dataclass
class Rule:
    """For prompts that match the regular expression `when`, give the `replies` in turn."""

    when: str
    replies: Sequence[str]
    turns: Any = field(init=False)

    def __post_init__(self) -> None:
        self.turns = itertools.cycle(self.replies)


class ScriptedEngine:
    """Reply with the first rule that matches; if none does, sample from the inner engine.

    So it does for a reply that the request's constraint forbids: no engine could sample it.
    """

    name = "scripted"

    def __init__(self, inner: Engine, directory: Path, rules: Sequence[Rule]) -> None:
        self._inner = inner
        self._tokenizer = Tokenizer(directory)
        self._grammars = Grammars(directory, self._tokenizer, self._tokenizer.vocab_size)
        self._rules = rules

    @property
    def running(self) -> bool:
        return self._inner.running

    async def start(self) -> None:
        await self._inner.start()

    async def stop(self) -> None:
        await self._inner.stop()

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        await self._inner.configure(arguments)

    async def make_room(self) -> bool:
        return await self._inner.make_room()

    async def load(self, lora: str, path: Path) -> None:
        await self._inner.load(lora, path)

    async def unload(self, lora: str) -> None:
        await self._inner.unload(lora)

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        prompt = self._tokenizer.decode(request.prompt_ids)
        rule = next((rule for rule in self._rules if re.search(rule.when, prompt)), None)
        # No script knows the logprobs of a prompt.
        if rule is None or request.prompt_logprobs or not await self._allows(request, rule):
            async for delta in self._inner.sample(request):
                yield delta
            return
        for index in range(request.n):
            for delta in self._reply(next(rule.turns), index, request):
                yield delta

    async def _allows(self, request: SampleRequest, rule: Rule) -> bool:
        if request.constraint is None:
            return True
        matcher = await asyncio.wrap_future(self._grammars.compile(request.constraint))
        for reply in rule.replies:
            ids, copy = self._tokenizer.encode(reply), matcher.deep_copy()
            if not (copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()):
                return False
        return True

    def _reply(self, text: str, index: int, request: SampleRequest) -> list[Delta]:
        ids = [*self._tokenizer.encode(text), min(self._tokenizer.eos_ids)]
        kept = ids[: request.most_tokens]
        size = PIECE if request.stream else len(kept)
        # The logprob of each token under a uniform policy.
        logprob = -math.log(self._tokenizer.vocab_size)
        deltas = [
            Delta(
                index,
                token_ids=kept[start : start + size],
                logprobs=[logprob] * len(kept[start : start + size]),
                top_logprobs=[[(token, logprob)] for token in kept[start : start + size]]
                if request.top_logprobs
                else [],
                text=self._tokenizer.decode(kept[start : start + size], skip_special_tokens=True),
            )
            for start in range(0, len(kept), size)
        ]
        deltas[-1].finish_reason = "stop" if len(kept) == len(ids) else "length"
        return deltas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path, help='JSON: [{"when": REGEX, "replies": [TEXT]}]')
    for flag in ("--base-model", "--host", "--state-dir"):
        parser.add_argument(flag)
    for flag in ("--port", "--openai-port"):
        parser.add_argument(flag, type=int)
    flags = vars(parser.parse_args())
    rules = [Rule(**rule) for rule in json.loads(flags.pop("script").read_text())]
    from kit.settings import gather
    from trainer.config import ServerConfig
    from trainer.server.app import serve

    def wrap(engine: Engine, directory: Path) -> Engine:
        return ScriptedEngine(engine, directory, rules)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(gather(ServerConfig, flags=flags), wrap_engine=wrap)


if __name__ == "__main__":
    main()
