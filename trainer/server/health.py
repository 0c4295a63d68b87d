"""Faults of a server that still runs, which `/health` and the log name."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from kit.files import set_aside
from kit.types import Json

logger = logging.getLogger(__name__)
LITTLE = 1 << 20  # bytes; with less, no checkpoint and hardly a request fits


class Health:
    """Collects faults. The server is `starting`, `ok`, `degraded` or `stopping`."""

    def __init__(self, state: Path | None = None) -> None:
        self._state = state
        self._faults: dict[str, str] = {}
        self.starting = False
        self.stopping = False

    def degrade(self, name: str, reason: str) -> None:
        """Note a fault; a later one with the same name takes its place."""
        logger.error("%s", reason)
        self._faults[name] = reason

    def set_aside(
        self, path: Path, cause: object, lost: str, companions: Iterable[str] = ()
    ) -> None:
        """Move a damaged file out of the way, and note what is `lost` with it."""
        try:
            where = f"it was set aside as `{set_aside(path, companions).name}`"
        except OSError as error:
            where = f"it could not be set aside ({error.strerror}) and is ignored"
        self.degrade(str(path), f"`{path}` is damaged ({cause}): {where}; {lost}")

    def report(self) -> Json:
        """The body of `/health`."""
        reasons = [*self._faults.values(), *self._disk()]
        if self.stopping:
            status = "stopping"
        elif self.starting:
            status = "starting"
        else:
            status = "degraded" if reasons else "ok"
        return {"status": status, **({"reasons": reasons} if reasons else {})}

    def _disk(self) -> list[str]:
        if self._state is None:
            return []
        try:
            # The directory may not exist yet, where the disk let nobody create it.
            found = os.statvfs(
                next(it for it in (self._state, *self._state.parents) if it.exists())
            )
        except OSError as error:
            return [f"The state directory `{self._state}` cannot be read: {error.strerror}"]
        if found.f_flag & os.ST_RDONLY:
            return [f"The disk of `{self._state}` is read-only: nothing can be trained"]
        if found.f_frsize and found.f_bavail * found.f_frsize < LITTLE:
            return [f"The disk of `{self._state}` is full: nothing can be trained"]
        return []
