"""Where the time of a train call goes."""

import time


class Clock:
    """Seconds of each part of a train call."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._since = now - self._since, now
