"""The Ray head of a server, which `scripts/ray-cluster` starts, and its dashboard."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.endpoints import request
from launcher.errors import ClusterNotFound, LauncherError, ProviderError, Unreachable
from launcher.provider import Provider

RAY_HEAD = ".art-cluster/ray-head"
"""File below the home of a server's cluster: where its Ray head is, and with which key to join."""
RAY_TOKEN = ".art-cluster/ray-token"
"""File below the home of a server's cluster: the token that the dashboard asks for."""
_LINE = re.compile(r"^(HEAD|ENGINE|ART_API_KEY|DASHBOARD)=(.+)$", re.MULTILINE)
_LAUNCH = "launcher up art-multi-node"


@dataclass(frozen=True)
class RayHead:
    """Where other machines join the server's Ray head."""

    address: str
    engine: str
    key: str = field(repr=False)
    dashboard: int | None
    """Port of the dashboard on the head's loopback; None if it is not installed there."""


def read_ray_head(provider: Provider, cluster: str) -> RayHead | None:
    """Read where the Ray head of a server is; None if the server does not run on Ray."""
    out = io.StringIO()
    try:
        provider.read(cluster, RAY_HEAD, follow=False, tail=0, out=out)
    except (ClusterNotFound, Unreachable):
        raise
    except LauncherError:  # there is no such file
        return None
    values = dict(_LINE.findall(out.getvalue()))
    try:
        address, engine, key = (values[name] for name in ("HEAD", "ENGINE", "ART_API_KEY"))
    except KeyError:
        return None
    port = values.get("DASHBOARD")
    return RayHead(address, engine, key, int(port) if port else None)


def no_ray(cluster: str, consequence: str, options: str = "") -> LauncherError:
    return LauncherError(
        f"The server of cluster `{cluster}` does not run on Ray: {consequence}",
        hint=f"Launch one that does with `{_LAUNCH}{options} -c NAME`",
    )


@contextlib.contextmanager
def open_dashboard(provider: Provider, cluster: str, local_port: int | None) -> Iterator[str]:
    """Forward Ray's dashboard to this machine, by default to the same port; yield its address."""
    setting = " --env RAY_DASHBOARD=1"
    head = read_ray_head(provider, cluster)
    if head is None:
        raise no_ray(cluster, "it has no dashboard", setting)
    if head.dashboard is None:
        raise LauncherError(
            f"Ray's dashboard is not installed on cluster `{cluster}`",
            hint=f"Launch a cluster that has it with `{_LAUNCH}{setting} -c NAME`",
        )
    with provider.tunnel(cluster, {head.dashboard: local_port or head.dashboard}) as ports:
        address = f"http://127.0.0.1:{ports[head.dashboard]}"
        status, _ = request(address, "GET", "/")
        if status != 200:
            raise ProviderError(
                f"Ray's dashboard on cluster `{cluster}` does not answer",
                hint=f"Read its log with `launcher logs server{provider.option} -c {cluster}`",
            )
        yield address
