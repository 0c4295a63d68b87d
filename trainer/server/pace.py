"""How the time between two steps of a run was spent: on sampling, or waiting for the agent.

During a step too, requests may be sampled: `time/overlap_s` says how long.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """Measures, from the end of one step to the start of the next, how long requests were sampled.

    The first step counts from the first request on, since nobody knows what came before it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._under_way = 0
        self._begun = 0.0
        self._sampled = 0.0
        self._before = 0.0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time of a request. Requests at the same time count once."""
        now = self._clock()
        if self._under_way == 0:
            self._begun = now
        if self._since is None:
            self._since = now
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._sampled += self._clock() - self._begun

    def before_step(self) -> dict[str, float]:
        """The seconds sampled and idle since the step before; nothing if no request came yet."""
        if self._since is None:
            return {}
        now = self._clock()
        sampled = self._before = self._sampled_until(now)
        return {"time/sample_s": sampled, "time/idle_s": max(now - self._since - sampled, 0)}

    def step_done(self) -> dict[str, float]:
        """The seconds sampled during the step. Begins to measure for the next one."""
        now = self._clock()
        overlap = self._sampled_until(now) - self._before
        self._since = self._begun = now
        self._sampled = self._before = 0.0
        return {"time/overlap_s": overlap}

    def _sampled_until(self, now: float) -> float:
        return self._sampled + (now - self._begun if self._under_way else 0)
