"""`launcher doctor`: check everything that a launch needs, and suggest a fix for each problem."""

import difflib
import math
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kit.errors import KitError
from kit.fit import Fit, engine_args, fits
from kit.gpus import CARDS
from kit.model_shape import read_shape
from kit.settings import ENV_FILE, read_env_file, variables
from launcher.cluster import Cluster
from launcher.endpoints import is_healthy
from launcher.errors import LauncherError, NoCapacity
from launcher.provider import Check, Price
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


@dataclass(frozen=True)
class Offer:
    """Cards that hold a model, and what they cost where that is known."""

    fit: Fit
    price: Price | None
    engine_args: Mapping[str, float]
    """Settings of vLLM without which the model would not fit."""

    @property
    def name(self) -> str:
        """As `sky launch --gpus` takes it."""
        return f"{self.fit.card.name}:{self.fit.count}"


def offers(cluster: Cluster, model: str) -> tuple[list[Offer], str]:
    """The cards that hold `model`, each with the least number; the cheapest first.

    Cards without a price come last, the smallest of them first. The second value says why there
    are no prices at all.
    """
    token = cluster.settings.hf_token
    shape = read_shape(model, token.get_secret_value() if token else None)
    prices, unknown = dict[tuple[str, int], Price](), ""
    held = fits(shape, list(CARDS.values()))
    try:
        prices = dict(cluster.provider.prices()) if held else {}
    except KitError as error:
        unknown = error.message
    found = [
        Offer(one, prices.get((one.card.name, one.count)), engine_args(shape, one)) for one in held
    ]
    return sorted(found, key=_rank), unknown


def cheapest(cluster: Cluster, model: str) -> tuple[Offer, str]:
    """The first of `offers`, and why there are no prices."""
    found, unknown = offers(cluster, model)
    if not found:
        raise NoCapacity(
            f"No listed card holds `{model}`, not even eight of the largest",
            hint="Use a smaller model, or several machines: the task `art-multi-node`",
        )
    if not unknown and found[0].price is None:
        unknown = "no cloud that SkyPilot can rent from lists a card that holds it"
    return found[0], unknown


def _rank(offer: Offer) -> tuple[float, int, float]:
    dollars = offer.price.per_hour if offer.price else math.inf
    return dollars, offer.fit.count, offer.fit.card.memory_gib


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
    name, option = cluster.name, cluster.provider.option
    try:
        status = cluster.status()
    except LauncherError as error:
        return [Check("cluster", False, error.message, error.hint)]
    if status is None:
        return [Check("cluster", True, f"there is no cluster `{name}`, so nothing costs money")]
    if status.status != "up":
        fix = (
            f"Finish it with `launcher up{option} -c {name}`, "
            f"or end it with `launcher down{option} -c {name}`"
        )
        return [Check("cluster", False, f"`{name}` is {status.status}", fix)]
    up = Check("cluster", True, f"`{name}` is up: {status.where}")
    fix = f"Read the server's log with `launcher logs server{option} -c {name}`"
    try:
        with cluster.tunnel() as endpoints:
            healthy = is_healthy(endpoints)
    except LauncherError as error:
        return [up, Check("health", False, error.message, error.hint)]
    message = "the server answers" if healthy else "the server does not answer"
    return [up, Check("health", healthy, message, fix)]
