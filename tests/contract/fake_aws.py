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
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)
    if "--delete" in flags:
        for path in [path for path in target.rglob("*") if path.is_file()]:
            if str(path.relative_to(target)) not in wanted:
                path.unlink()


def main(service: str, verb: str, *arguments: str) -> None:
    if verb == "sync":
        if "no-such-bucket" in arguments[0]:
            sys.exit("fatal error: The specified bucket does not exist")
        sync(local(arguments[0]), local(arguments[1]), list(arguments[2:]))
    elif verb == "ls":
        for path in sorted(local(arguments[0]).iterdir()):
            sys.stdout.write(f"                           PRE {path.name}/\n")


main(*sys.argv[1:])
