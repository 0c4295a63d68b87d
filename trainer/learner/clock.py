"""Measures how long each part of a train call takes."""

import time


class Clock:
    """Records the seconds of each part of a train call."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """Record the time since the previous lap, or since the start, as `name`."""
        now = time.monotonic()
        self.laps[name], self._since = now - self._since, now
