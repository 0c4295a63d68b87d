"""What the kernel tells of running processes."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

LISTENS = "0A"


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    found = []
    for each in children(pid):
        found.append(each)
        with contextlib.suppress(OSError):  # it has ended
            found += descendants(each)
    return found


def child(pid: int, module: str) -> int:
    """The process of `module` that another one started, or is about to start."""
    while True:
        for found in children(pid):
            with contextlib.suppress(OSError):  # it has ended
                if module in Path(f"/proc/{found}/cmdline").read_text():
                    return found
        time.sleep(0.05)


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def listens_at(pid: int) -> set[str]:
    """The addresses at which a process takes TCP connections."""
    found = set()
    sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == LISTENS and f"socket:[{inode}]" in sockets:
                address = local.partition(":")[0]
                short = table == "tcp"
                found.add(
                    socket.inet_ntoa(struct.pack("<I", int(address, 16))) if short else address
                )
    return found


def wait_until_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        while _lives(pid):
            time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
