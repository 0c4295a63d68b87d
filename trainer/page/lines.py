"""Follows a file of JSON lines: each call parses only the lines appended since the one before."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.types import Json

BAD_LINE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What a line of another shape raises."""


def parse(line: bytes) -> Json:
    """A line as an object. Halves of characters, which no answer can hold, are replaced."""
    value: Any = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if b"\\ud" in line or b"\\uD" in line:
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        value = json.loads(text)
    return dict(value)


class Lines:
    """Hands each new line of `path` to `add`; calls `reset` if the file was written anew."""

    def __init__(
        self, path: Path, *, add: Callable[[Json], None], reset: Callable[[], None]
    ) -> None:
        self.path = path
        self.broken = 0
        """Complete lines that are not JSON objects."""
        self.incomplete = False
        """Whether the last line has no end, because it is being written or the disk was full."""
        self.version = 0
        """Changes whenever lines were added."""
        self._add = add
        self._reset = reset
        self._identity: tuple[int, int] | None = None
        self._end = 0
        self._seen: tuple[int, int] | None = None
        self._lock = threading.Lock()

    @property
    def exists(self) -> bool:
        return self._identity is not None

    def read(self) -> None:
        """Parse what was appended. A file that is gone has no lines."""
        with self._lock:
            try:
                about = self.path.stat()
            except OSError:
                self._start_over(None)
                return
            identity = about.st_dev, about.st_ino
            if identity != self._identity or about.st_size < self._end:
                self._start_over(identity)
            if (about.st_size, about.st_mtime_ns) != self._seen:
                self._seen = about.st_size, about.st_mtime_ns
                self._read_from_end()

    def _start_over(self, identity: tuple[int, int] | None) -> None:
        if self._identity is None and identity is None:
            return
        self._identity, self._end, self._seen = identity, 0, None
        self.broken, self.incomplete = 0, False
        self.version += 1
        self._reset()

    def _read_from_end(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._end)
                data = file.read()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self.incomplete = whole < len(data)
        self._end += whole
        for line in data[:whole].splitlines():
            if line.strip():
                self._parse(line)
        self.version += whole > 0

    def _parse(self, line: bytes) -> None:
        try:
            self._add(parse(line))
        except BAD_LINE:
            self.broken += 1


def tail(path: Path, count: int, *, most_bytes: int = 1 << 20) -> list[str]:
    """The last lines of a text file, from at most its last `most_bytes`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - most_bytes, 0))
            data = file.read()
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()[-count:]
