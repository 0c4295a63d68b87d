"""`launcher doctor`: what a launch needs, looked at one by one, with a fix for each."""

import difflib
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kit.errors import KitError
from kit.settings import ENV_FILE, read_env_file, variables
from launcher.cluster import Cluster
from launcher.endpoints import is_healthy
from launcher.errors import LauncherError
from launcher.provider import Check
from launcher.settings import Settings

_RSYNC = (3, 1)  # `--delete-missing-args` and `--info`


def examine(cluster: Cluster, env_file: Path | None) -> list[Check]:
    """Every check, from this machine to the health of the server; the cluster need not exist."""
    found = [_python(), _rsync(), *(_program(name) for name in ("ssh", "git"))]
    found.append(_env_file(env_file or ENV_FILE))
    try:
        checks = cluster.provider.checks()
    except KitError as error:
        return [*found, Check("provider", False, error.message, error.hint)]
    found += checks
    if all(check.ok for check in checks):
        found += _cluster(cluster)
    return found


def _python() -> Check:
    version = platform.python_version()
    return Check("Python", sys.version_info >= (3, 11), f"version {version}", "Install 3.11")


def _program(name: str) -> Check:
    there = shutil.which(name)
    return Check(name, bool(there), there or f"`{name}` is not installed", f"Install `{name}`")


def _rsync() -> Check:
    fix = "Install rsync 3.1 or later; on macOS with `brew install rsync`"
    if not shutil.which("rsync"):
        return Check("rsync", False, "`rsync` is not installed", fix)
    told = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
    version = re.search(r"rsync\s+version\s+(\d+)\.(\d+)", told)
    numbers = (int(version[1]), int(version[2])) if version else (0, 0)
    return Check("rsync", numbers >= _RSYNC, f"version {numbers[0]}.{numbers[1]}", fix)


def _env_file(path: Path) -> Check:
    if not path.is_file():
        told = f"there is no `{path}`, so the defaults of the tasks hold"
        return Check(".env", True, told, "Copy `.env.example` to it and fill it in")
    known = list(variables(Settings).values())
    for name in read_env_file(path):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if name not in known and near:
            told = f"`{path}` sets `{name}`, which nothing reads"
            return Check(".env", False, told, f"Did you mean `{near[0]}`?")
    if path.stat().st_mode & 0o077 and _holds_secrets(path):
        told = f"`{path}` holds secrets, and other users of this machine may read it"
        return Check(".env", False, told, f"Run `chmod 600 {path}`")
    return Check(".env", True, f"`{path}` is read")


def _holds_secrets(path: Path) -> bool:
    secrets = {name for name in variables(Settings).values() if name.endswith(("_KEY", "_TOKEN"))}
    return bool(secrets & read_env_file(path).keys())


def _cluster(cluster: Cluster) -> list[Check]:
    name = cluster.name
    try:
        status = cluster.status()
    except LauncherError as error:
        return [Check("cluster", False, error.message, error.hint)]
    if status is None:
        return [Check("cluster", True, f"there is no cluster `{name}`, and nothing is paid for")]
    if status.status != "up":
        fix = f"Finish it with `launcher up -c {name}`, or end it with `launcher down -c {name}`"
        return [Check("cluster", False, f"`{name}` is {status.status}", fix)]
    found = [Check("cluster", True, f"`{name}` is up: {status.where}")]
    fix = f"See why with `launcher logs server -c {name}`"
    try:
        with cluster.tunnel() as endpoints:
            healthy = is_healthy(endpoints)
    except LauncherError as error:
        return [*found, Check("health", False, error.message, error.hint)]
    told = "the server answers" if healthy else "the server does not answer"
    return [*found, Check("health", healthy, told, fix)]
