"""`Ahead`: reads and prepares the next request of a run while a step trains.

Otherwise a GPU would wait for it between two steps.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kit.state_dir import STEP_NAME, step_name

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Prepares one request at a time, in a thread."""

    def __init__(self, prepare: Callable[[Path], Result]) -> None:
        self._prepare = prepare
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._found: tuple[object, Result] | None = None
        """What was prepared, and the identity of its file."""

    def look(self, path: Path | None) -> bool:
        """Begin to prepare a request, and return whether it is there. Call this at any time."""
        if path is None or not path.exists():
            return False
        if path == self._path:
            return True
        self._join()
        self._path, self._found = path, None
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()
        return True

    def take(self, path: Path) -> Result | None:
        """Return what was prepared of a request, or None if that was not possible."""
        self._join()
        found = self._found if path == self._path else None
        self._found = self._path = None
        # The same step may have another request by now, because an earlier step failed.
        return found[1] if found and found[0] == _identity(path) else None

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None

    def _run(self, path: Path) -> None:
        try:
            self._found = _identity(path), self._prepare(path)
        except Exception as error:  # the step itself reports what is wrong with its request
            logger.info("`%s` was not prepared ahead: %s", path, error)


def _identity(path: Path) -> object:
    """Tell a request from another one under the same name."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


def next_request(path: Path) -> Path | None:
    """Return where the request after this one will be: a step's file has its number in its name."""
    if not (number := STEP_NAME.search(path.name)):
        return None
    before, after = path.name[: number.start()], path.name[number.end() :]
    return path.with_name(f"{before}{step_name(int(number[0]) + 1)}{after}")
