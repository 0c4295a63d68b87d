"""What is told of the server of a cluster that runs already, or that did not come to run."""

import io
from collections.abc import Sequence

from launcher.errors import ProviderError
from launcher.provider import SETUP_FAILED, Provider, Run
from launcher.task import Task


def kept(cluster: str, server: Run, task: Task, given: Sequence[str]) -> str:
    """That a server runs already, and what was given for a new one, without any value of it."""
    options = [f"`{it.partition('=')[0]}`" for it in given if it.startswith("-")]
    other = [f"`{task.path}`"] if server.name != task.name else []
    told = f"The server of cluster `{cluster}` runs already, with its first lease"
    if not (ignored := ", ".join(dict.fromkeys([*other, *options]))):
        return told
    return f"{told}; not applied, since the cluster exists: {ignored}"


def ended_early(provider: Provider, cluster: str, run_id: str) -> ProviderError:
    """Why a server is not there, by the last lines of its log."""
    out = io.StringIO()
    provider.logs(cluster, run_id, follow=False, tail=20, out=out)
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    see = f"See why with `launcher logs {run_id} -c {cluster}`"
    if any(SETUP_FAILED in line for line in lines):
        return ProviderError(
            f"The setup of cluster `{cluster}` failed",
            hint=f"{see}, mend it and launch again, or `launcher down -c {cluster}`",
        )
    last = f"`{lines[-1]}`" if lines else "it wrote nothing"
    return ProviderError(
        f"The server of cluster `{cluster}` ended before it was healthy: {last}", hint=see
    )
