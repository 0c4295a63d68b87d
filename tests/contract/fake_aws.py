"""Stands in for the AWS CLI in tests: `s3 sync` and `s3 ls` on a directory, `FAKE_S3`."""

import fnmatch
import os
import shutil
import sys
from pathlib import Path


def local(place: str) -> Path:
    root = os.environ["FAKE_S3"]
    return Path(place.replace("s3://", f"{root}/", 1) if place.startswith("s3://") else place)


def sync(source: Path, target: Path, flags: list[str]) -> None:
    excluded = [flags[at + 1] for at, flag in enumerate(flags) if flag == "--exclude"]
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    wanted = {n for n in names if not any(fnmatch.fnmatch(n, pattern) for pattern in excluded)}
    for name in wanted:
        if is_current(source / name, target / name, flags):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)
    if "--delete" in flags:
        for path in [path for path in target.rglob("*") if path.is_file()]:
            name = str(path.relative_to(target))
            if name not in wanted and not any(fnmatch.fnmatch(name, one) for one in excluded):
                path.unlink()


def is_current(source: Path, target: Path, flags: list[str]) -> bool:
    """Whether the real CLI would skip a file: by its size and time, never by its bytes."""
    if not target.is_file() or source.stat().st_size != target.stat().st_size:
        return False
    there, here = (int(path.stat().st_mtime) for path in (source, target))
    download = not str(target).startswith(os.environ["FAKE_S3"])
    if not download:
        return there <= here
    return there == here if "--exact-timestamps" in flags else there >= here


def main(service: str, verb: str, *arguments: str) -> None:
    if verb == "sync":
        if "no-such-bucket" in arguments[0]:
            sys.exit("fatal error: The specified bucket does not exist")
        sync(local(arguments[0]), local(arguments[1]), list(arguments[2:]))
    elif verb == "ls":
        for path in sorted(local(arguments[0]).iterdir()):
            sys.stdout.write(f"                           PRE {path.name}/\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
