"""A log that is shown while something else is waited for."""

import contextlib
import io
import threading
from collections.abc import Callable
from typing import Self, TextIO, cast


class Showing:
    """Follows a log beside the caller, from `start` until the end of the `with`.

    `follow` is given what to write to, and is asked to stop by an error when it next writes.
    """

    def __init__(self, follow: Callable[[TextIO], None]) -> None:
        self._follow = follow
        self._valve: _Valve | None = None

    def start(self, out: TextIO) -> None:
        """Safe to repeat: one log is shown once."""
        if self._valve is None:
            self._valve = _Valve(out)
            threading.Thread(target=self._run, args=(self._valve,), daemon=True).start()

    def _run(self, valve: "_Valve") -> None:
        with contextlib.suppress(Exception):  # a log that cannot be shown stops nothing
            self._follow(cast(TextIO, valve))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._valve is not None:
            self._valve.open = False


class _Valve(io.TextIOBase):
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.open = True

    def write(self, text: str) -> int:
        if not self.open:
            raise RuntimeError("nobody looks any more")
        return self._out.write(text)

    def flush(self) -> None:
        if self.open:
            self._out.flush()
