"""`Forward`: an `ssh -N -L` that is started again whenever it exits."""

import contextlib
import logging
import subprocess
import threading
from collections.abc import Sequence

logger = logging.getLogger(__name__)


class Forward(threading.Thread):
    """Runs `command` until `close`, and starts it again `pause` seconds after it exits."""

    def __init__(self, command: Sequence[str], *, pause: float = 1.0) -> None:
        super().__init__(daemon=True, name="ssh forward")
        self._command = list(command)
        self._pause = pause
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process = self._spawn()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self) -> None:
        while not self._closing.is_set():
            self._process.wait()
            if self._closing.wait(self._pause):
                return
            with self._lock:
                if self._closing.is_set():
                    return
                logger.warning("The tunnel closed; opening it again")
                self._process = self._spawn()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._process.kill()
            self._process.wait()
        if self.is_alive():
            self.join(timeout=10)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
