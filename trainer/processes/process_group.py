"""Runs a program of several processes so that none of them outlives the server.

`python -m trainer.processes.process_group PROGRAM ARGUMENT...` stands between `trainer serve` and
`vllm serve`: vLLM's engine processes survive the death of its API process, and would go on holding
the card's memory. This process leads their group, and ends all of it when the program ends, when
it is asked to, or when the server is gone.
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
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent(signal.SIGTERM)
    child = subprocess.Popen(sys.argv[1:])
    try:
        code = child.wait()
        # Said here, since the end of the group below ends this process too.
        sys.stderr.write(f"process group: the program ended with code {code}\n")
    finally:
        sys.stderr.flush()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        os.killpg(0, signal.SIGKILL)


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


def _leave(*_: object) -> None:
    """Break out of `wait`. Once: the parent's death may be told more than once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


if __name__ == "__main__":
    main()
