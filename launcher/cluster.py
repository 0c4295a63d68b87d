"""`Cluster`: the verbs, on a named cluster of any provider."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from launcher import checkpoints
from launcher.checkpoints import PulledCheckpoint
from launcher.errors import ClusterNotFound, LauncherError, ProviderError
from launcher.provider import ClusterInfo, Provider, Run, RunStatus
from launcher.settings import Settings, read
from launcher.task import Task

# `run` starts in the synced workdir with its environment active, whatever the provider.
_PROLOGUE = "cd ~/sky_workdir\nif [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi\n"


@dataclass(frozen=True)
class Endpoints:
    """Where a server answers on this machine."""

    control: str
    openai: str

    def exports(self) -> dict[str, str]:
        return {"ART_BASE_URL": self.control, "OPENAI_BASE_URL": self.openai}


class Cluster:
    """A named cluster. Creating the object touches nothing; each verb is one call.

        cluster = Cluster("art")
        cluster.up(Task.load(Path("sky/art-cpu.yaml"), cluster.settings))
        with cluster.tunnel() as endpoints:
            ...
        cluster.down(Path("checkpoints"))

    Without a provider it is SkyPilot's; `LocalProvider()` makes it one of this machine.
    """

    def __init__(
        self, name: str, *, provider: Provider | None = None, settings: Settings | None = None
    ) -> None:
        self.name = name
        self._provider = provider
        self._settings = settings

    @property
    def settings(self) -> Settings:
        self._settings = self._settings or read()
        return self._settings

    @property
    def provider(self) -> Provider:
        if self._provider is None:
            from launcher.sky_provider import SkyProvider  # SkyPilot takes seconds to import

            self._provider = SkyProvider()
        return self._provider

    def up(
        self,
        task: Task,
        arguments: Sequence[str] = (),
        *,
        progress: Callable[[str], None] = lambda message: None,
    ) -> bool:
        """Bring the cluster up, start the task and wait until its server is healthy.

        Safe to repeat: a server that is alive is waited for, not started twice. False when the
        `arguments` for `sky launch` asked for a rehearsal.
        """
        server = self._server()
        if server is None:
            server = self.provider.launch(self.name, task, arguments)
            if server is None:
                return False
        elif arguments:
            raise ProviderError(
                f"Cluster `{self.name}` is up already, and `{arguments[0]}` would have no effect",
                hint=f"Leave it out, or end the cluster with `launcher down -c {self.name}`",
            )
        else:
            progress(f"The server of cluster `{self.name}` runs already")
        self._wait_until_healthy(server.id, progress)
        return True

    def run(self, command: str) -> Run:
        """Start `command` beside the server, in the workdir with its environment active."""
        endpoints = _endpoints(self.settings.port, self.settings.openai_port)
        return self.provider.run(
            self.name, _PROLOGUE + command, endpoints.exports(), self.settings.secrets()
        )

    def wait(self, run: Run, *, every: float = 2.0) -> int:
        """Wait until `run` is over and return its exit code."""
        while not self._run(run.id).status.over:
            time.sleep(every)
        return self.provider.exit_code(self.name, run.id)

    def logs(
        self,
        run_id: str | None = None,
        *,
        follow: bool = False,
        tail: int = 0,
        out: TextIO | None = None,
    ) -> None:
        """Write the output of a run, by default the newest, to `out` (stdout)."""
        if run_id is None:
            runs = self.provider.runs(self.name)
            if not runs:
                raise LauncherError(
                    f"Cluster `{self.name}` has no runs yet",
                    hint=f"Start one with `launcher run -c {self.name} COMMAND`",
                )
            run_id = runs[-1].id
        else:
            self._run(run_id)
        self.provider.logs(self.name, run_id, follow=follow, tail=tail, out=out or sys.stdout)

    def pull(self, to: Path) -> list[PulledCheckpoint]:
        """Bring the checkpoints home and verify each; what is here already is not sent again."""
        return checkpoints.pull(self.provider, self.name, to)

    @contextlib.contextmanager
    def tunnel(self, port: int = 0, openai_port: int = 0) -> Iterator[Endpoints]:
        """Make both ports of the server reachable on this machine; 0 is any free port."""
        settings = self.settings
        wanted = {settings.port: port, settings.openai_port: openai_port}
        with self.provider.tunnel(self.name, wanted) as local:
            yield _endpoints(local[settings.port], local[settings.openai_port])

    def status(self) -> ClusterInfo | None:
        """The cluster as its provider sees it, or None."""
        return next((it for it in self.provider.clusters() if it.name == self.name), None)

    def runs(self) -> list[Run]:
        return self.provider.runs(self.name)

    def down(self, pull_to: Path | None) -> list[PulledCheckpoint]:
        """End the cluster, after its checkpoints are safe in `pull_to`; None discards them."""
        status = self.status()
        pulled = []
        if pull_to is not None and status is not None and status.status != "init":
            pulled = self.pull(pull_to)
        self.provider.down(self.name)
        return pulled

    def _server(self) -> Run | None:
        """The task's own run if it is alive: the first of those that are."""
        status = self.status()
        if status is None or status.status != "up":
            return None
        with contextlib.suppress(ClusterNotFound):
            for run in self.provider.runs(self.name):
                if not run.status.over and run.name != "run":
                    return run
        return None

    def _run(self, run_id: str) -> Run:
        for run in self.provider.runs(self.name):
            if run.id == run_id:
                return run
        raise LauncherError(
            f"Cluster `{self.name}` has no run `{run_id}`",
            hint=f"List its runs with `launcher ls -c {self.name}`",
        )

    def _wait_until_healthy(self, run_id: str, progress: Callable[[str], None]) -> None:
        """As long as the run is alive: setup takes what the machine and its network need."""
        started = time.monotonic()
        while True:
            with self.tunnel() as endpoints:
                for _ in range(15):
                    if is_healthy(endpoints):
                        return
                    time.sleep(1)
            status = self._run(run_id).status
            if status.over:
                raise ProviderError(
                    f"The server of cluster `{self.name}` ended before it was healthy: "
                    f"{self._last_line(run_id)}",
                    hint=f"See why with `launcher logs {run_id} -c {self.name}`",
                )
            where = "waits for its turn" if status is RunStatus.PENDING else "is being set up"
            progress(f"The server {where} ({time.monotonic() - started:.0f} s)")

    def _last_line(self, run_id: str) -> str:
        out = io.StringIO()
        self.provider.logs(self.name, run_id, follow=False, tail=20, out=out)
        lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
        return f"`{lines[-1]}`" if lines else "it wrote nothing"


def is_healthy(endpoints: Endpoints) -> bool:
    """Whether both ports answer."""
    addresses = (endpoints.control, endpoints.openai.removesuffix("/v1"))
    try:
        # The addresses are loopback: a proxy of the environment has no say.
        with httpx.Client(trust_env=False, timeout=10) as client:
            return all(client.get(f"{address}/health").is_success for address in addresses)
    except httpx.TransportError:
        return False


def wait_until_healthy(endpoints: Endpoints, cluster: str, patience: float = 60.0) -> None:
    """Return when the server answers, or raise after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not is_healthy(endpoints):
        if time.monotonic() > deadline:
            raise ProviderError(
                f"The server of cluster `{cluster}` does not answer",
                hint=f"See what it does with `launcher logs -c {cluster}`",
            )
        time.sleep(1)


def wait_for_ever(endpoints: Endpoints, cluster: str) -> None:
    """Until Ctrl-C, or an error when the server is gone."""
    while True:
        time.sleep(30)
        wait_until_healthy(endpoints, cluster)


def _endpoints(port: int, openai_port: int) -> Endpoints:
    return Endpoints(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{openai_port}/v1")
