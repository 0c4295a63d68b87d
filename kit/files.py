"""Files that outlive a crash, a full disk and a careless hand.

Lines are appended so that a line that was cut off spoils no other, and read with tolerance. A file
that cannot be understood is set aside under another name, never deleted.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit import json_text
from kit.types import Json

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600
DAMAGED = ".damaged-"
SETTLED_NS = 100_000_000
"""A file written more recently than this could change again within one clock tick."""


@dataclass(frozen=True)
class Lines:
    """The objects of a file of JSON lines, and the numbers of the lines that hold none."""

    rows: list[Json] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def read_lines(path: Path) -> Lines:
    """Read JSON lines. A missing file has none; lines that are not JSON objects are counted."""
    found = Lines()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return found
    for number, line in enumerate(data.split(b"\n"), 1):  # JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            found.rows.append(row)
        else:
            found.skipped.append(number)
    return found


def append_lines(path: Path, rows: Iterable[Any]) -> None:
    """Append JSON lines, after a line end if the last line was cut off.

    A row of bytes is JSON already.
    """
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
        cut = bool(end) and file.read(1) != b"\n"
        for row in rows:
            text = row if isinstance(row, bytes) else json_text.dump(row)
            line = b"\n" * cut + text + b"\n"
            cut = False
            view = memoryview(line)
            while view:  # a disk that is almost full takes a part
                view = view[file.write(view) :]


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: it has its old content or its new one, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a directory and those above it, so that a power cut takes none of them back."""
    missing = [it for it in (path, *path.parents) if not it.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync(directory.parent)  # which holds its name


def set_aside(path: Path, companions: Iterable[str] = ()) -> Path:
    """Rename a damaged file to a free name beside it, and return that name.

    `companions` are the endings of files that belong to it.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = [
        f"{path.name}{DAMAGED}{stamp}{suffix}" for suffix in ("", *map("-{}".format, range(99)))
    ]
    aside = next(found for name in names if not (found := path.with_name(name)).exists())
    path.rename(aside)
    make_private(aside)
    for ending in companions:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + ending).rename(aside.with_name(aside.name + ending))
    return aside


def make_private(path: Path) -> None:
    """Take a file or directory of this user away from everybody else."""
    mode = PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE
    with contextlib.suppress(OSError):  # not ours, or a file system without modes
        if not path.is_symlink() and path.stat().st_mode & 0o077:
            path.chmod(path.stat().st_mode & mode)


def identity(path: Path) -> tuple[tuple[int, ...], bool]:
    """What changes whenever the file or directory does, and whether that is certain already."""
    now, about = time.time_ns(), path.stat()
    found = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return found, now - max(about.st_mtime_ns, about.st_ctime_ns) > SETTLED_NS
