"""A taskset for `verifiers` 0.4: name a thing of a kind, in one word.

Both rewards are dense, so even a small model learns from its first samples.
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from kinds import KINDS, names_one, prompt, shortness


class KindData(vf.TaskData):
    words: str


class KindTask(vf.Task[KindData]):
    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return shortness(trace.last_reply)

    @vf.reward(weight=0.5)
    async def named(self, trace: vf.Trace) -> float:
        return names_one(trace.last_reply, self.data.words)


class OneWordTaskset(vf.Taskset[KindTask]):
    def load(self) -> Iterator[KindTask]:
        for kind, words in KINDS.items():
            yield KindTask(KindData(prompt=prompt(kind), words=words), self.config.task)


__all__ = ["OneWordTaskset"]
