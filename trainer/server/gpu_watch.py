"""How busy and how full the GPUs of this machine are, between the steps of a run."""

import logging
import threading
from collections.abc import Callable, Sequence

from trainer.engines.gpus import visible_gpus

logger = logging.getLogger(__name__)
INTERVAL = 1.0  # seconds; NVML's own figure is the mean of about this long
USE, MEMORY = "gpu/use", "gpu/memory_gib"
Reading = tuple[float, float]
"""The share of the time in which a GPU computed, and the bytes in use on it."""


class GpuWatch:
    """Reads the GPUs from a thread while it runs. Without a GPU it does nothing."""

    def __init__(self, read: Callable[[], Sequence[Reading]] | None = None) -> None:
        self._read = read or _reader()
        self._uses: list[float] = []
        self._fullest = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self) -> None:
        if self._read is not None:
            threading.Thread(target=self._watch, args=(self._read,), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def since_last(self) -> dict[str, float]:
        """The mean use of the GPUs, and the most memory used on one, since the last call."""
        with self._lock:
            uses, self._uses = self._uses, []
            fullest, self._fullest = self._fullest, 0.0
        return {USE: sum(uses) / len(uses), MEMORY: fullest / (1 << 30)} if uses else {}

    def note(self, readings: Sequence[Reading]) -> None:
        """Add what all GPUs showed at one moment."""
        with self._lock:
            self._uses.append(sum(use for use, _ in readings) / len(readings))
            self._fullest = max(self._fullest, *(used for _, used in readings))

    def _watch(self, read: Callable[[], Sequence[Reading]]) -> None:
        while not self._over.wait(INTERVAL):
            try:
                self.note(read())
            except Exception as error:  # a driver that fails must not end the server
                logger.warning("The GPUs are no longer watched: %s", error)
                return


def _reader() -> Callable[[], list[Reading]] | None:
    """Return what reads the visible GPUs with NVML, which vLLM brings along."""
    names = visible_gpus()
    if not names:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]
    except Exception as error:  # no package, no driver, or a GPU with another kind of name
        logger.info("The use of the GPUs is not measured: %s", error)
        return None

    def read() -> list[Reading]:
        return [
            (
                pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
                float(pynvml.nvmlDeviceGetMemoryInfo(gpu).used),
            )
            for gpu in gpus
        ]

    return read
