"""Run a program of several processes, and make sure that none of them outlives the server.

`python -m trainer.processes.process_group PROGRAM ARGUMENT...` runs between `trainer serve` and
`vllm serve`. vLLM's engine processes survive the death of its API process and would keep holding
GPU memory. This process leads their process group and kills the whole group when the
program ends, when it receives SIGTERM, or when the server dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from trainer.processes.worker import die_with_parent

GRACE = 8.0  # seconds the program has to clean up


def main() -> None:
    signal.signal(signal.SIGTERM, _exit_once)
    die_with_parent(signal.SIGTERM)
    child = subprocess.Popen(sys.argv[1:])
    try:
        code = child.wait()
        # Log it now: killing the group below also kills this process.
        sys.stderr.write(f"process group: the program ended with code {code}\n")
    finally:
        sys.stderr.flush()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        os.killpg(0, signal.SIGKILL)


def members(group: int) -> list[int]:
    """Return the pids of a group's processes that are still running."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended in the meantime
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                pids.append(int(path.parent.name))
    return pids


def _exit_once(*_: object) -> None:
    """Break out of `wait`. Ignore further signals: the parent's death may send several."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


if __name__ == "__main__":
    main()
