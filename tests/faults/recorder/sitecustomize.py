"""Records what a process syncs, as a disk holds it after a power cut: see `test_power_cut.py`.

Python imports this module at its start in every process that has its directory in `PYTHONPATH`.
"""

import json
import os
import stat
import threading

RECORD = os.environ.get("RECORD_SYNCED", "")
_fsync = os.fsync


def fsync(descriptor: int) -> None:
    """Sync, then keep the content of the file, or the names in the directory, by inode."""
    _fsync(descriptor)
    about = os.fstat(descriptor)
    path = f"/proc/self/fd/{descriptor}"
    if stat.S_ISDIR(about.st_mode):
        with os.scandir(path) as entries:
            names = {e.name: [e.inode(), e.is_dir(follow_symlinks=False)] for e in entries}
        content = json.dumps(names).encode()
    else:
        with open(path, "rb") as file:
            content = file.read()
    temporary = f"{RECORD}/{os.getpid()}-{threading.get_ident()}"
    with open(temporary, "wb") as copy:
        copy.write(content)
    os.rename(temporary, f"{RECORD}/{about.st_ino}")


if RECORD:
    os.fsync = fsync
