"""`launcher doctor`: check everything that a launch needs, and suggest a fix for each problem."""

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
from launcher.settings import OPTIONAL_SECRETS, Settings

_OLDEST_RSYNC = (3, 1)  # the first with `--delete-missing-args` and `--info`


def examine(cluster: Cluster, env_file: Path | None) -> list[Check]:
    """Run every check: this machine, the provider and, if there is one, the cluster's server."""
    checks = [_python(), _rsync(), *(_program(name) for name in ("ssh", "git"))]
    checks.append(_env_file(env_file or ENV_FILE))
    try:
        provider_checks = cluster.provider.checks()
    except KitError as error:
        return [*checks, Check("provider", False, error.message, error.hint)]
    checks += provider_checks
    if all(check.ok for check in provider_checks):
        checks += _cluster(cluster)
    return checks


def _python() -> Check:
    version = platform.python_version()
    fix = "Install Python 3.11 or later"
    return Check("Python", sys.version_info >= (3, 11), f"version {version}", fix)


def _program(name: str) -> Check:
    path = shutil.which(name)
    return Check(name, bool(path), path or f"`{name}` is not installed", f"Install `{name}`")


def _rsync() -> Check:
    fix = "Install rsync 3.1 or later; on macOS with `brew install rsync`"
    if not shutil.which("rsync"):
        return Check("rsync", False, "`rsync` is not installed", fix)
    output = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"rsync\s+version\s+(\d+)\.(\d+)", output)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return Check("rsync", version >= _OLDEST_RSYNC, f"version {version[0]}.{version[1]}", fix)


def _env_file(path: Path) -> Check:
    if not path.is_file():
        message = f"there is no `{path}`, so the defaults of the tasks apply"
        return Check(".env", True, message, f"Copy `.env.example` to `{path}` and fill it in")
    values, names = read_env_file(path), list(variables(Settings).values())
    for name in values:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        if name not in names and near:
            message = f"`{path}` sets `{name}`, which nothing reads"
            return Check(".env", False, message, f"Did you mean `{near[0]}`?")
    if path.stat().st_mode & 0o077 and OPTIONAL_SECRETS & values.keys():
        message = f"`{path}` contains secrets, and other users of this machine can read it"
        return Check(".env", False, message, f"Run `chmod 600 {path}`")
    return Check(".env", True, f"`{path}` is valid")


def _cluster(cluster: Cluster) -> list[Check]:
    name = cluster.name
    try:
        status = cluster.status()
    except LauncherError as error:
        return [Check("cluster", False, error.message, error.hint)]
    if status is None:
        return [Check("cluster", True, f"there is no cluster `{name}`, so nothing costs money")]
    if status.status != "up":
        fix = f"Finish it with `launcher up -c {name}`, or end it with `launcher down -c {name}`"
        return [Check("cluster", False, f"`{name}` is {status.status}", fix)]
    up = Check("cluster", True, f"`{name}` is up: {status.where}")
    fix = f"Read the server's log with `launcher logs server -c {name}`"
    try:
        with cluster.tunnel() as endpoints:
            healthy = is_healthy(endpoints)
    except LauncherError as error:
        return [up, Check("health", False, error.message, error.hint)]
    message = "the server answers" if healthy else "the server does not answer"
    return [up, Check("health", healthy, message, fix)]
