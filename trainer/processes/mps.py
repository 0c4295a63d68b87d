"""CUDA MPS: the engine and the learner compute on the same GPUs at the same time.

Without it a GPU computes for one process at a time, and switches. With it the processes share a
fate: if one dies while it computes, the GPU ends the other too, and the server starts both again.
"""

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from kit.errors import ConfigError
from trainer.errors import TrainerError
from trainer.processes.worker import environment_without_keys, open_log

logger = logging.getLogger(__name__)
PROGRAM = "nvidia-cuda-mps-control"
READY_WITHIN = 20.0  # seconds
# The priority of the engine's streams. `in_vllm/stream_priority.py` sets it, and the learner takes
# it for some of its rows (`trainer/learner/precedence.py`). The learner's part of the GPU must not
# be limited (`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`): with 70 % its logprobs were wrong, and soon NaN
# (torch 2.11 on an H200).
PRIORITY_VARIABLE = "ART_ENGINE_PRIORITY"
BY_STREAMS = {PRIORITY_VARIABLE: "-1"}
# For an engine without these priorities: all of the learner's streams come after the engine's.
BEHIND = {"CUDA_MPS_CLIENT_PRIORITY": "1"}


class Mps:
    """The daemon that joins the processes of one server."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process computes through the daemon."""
        directory = str(self._directory)
        return {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}

    async def start(self) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise ConfigError(
                f"`mps` is set, but there is no program `{PROGRAM}` here",
                hint="It comes with NVIDIA's driver; install it, or remove `--mps`",
            )
        # A temporary directory, because a socket's path can have at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="art-mps-"))
        with open_log(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "trainer.processes.process_group", program, "-f"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment_without_keys(), **self.environment},
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_WITHIN
        while not (self._directory / "control").exists():
            if self._process.returncode is not None or time.monotonic() > deadline:
                await self.stop()
                raise TrainerError("CUDA MPS did not start", hint=f"See `{self._log}`")
            await asyncio.sleep(0.05)
        logger.info("engine and learner share the GPU by CUDA MPS")

    async def stop(self) -> None:
        """End the daemon, once its processes have ended."""
        if self._process and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
