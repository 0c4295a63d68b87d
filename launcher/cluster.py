"""`Cluster`: everything the launcher can do with a named cluster, whatever its provider."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from kit.state_dir import LOGS
from launcher import bundle, checkpoints
from launcher.checkpoints import PulledCheckpoint
from launcher.endpoints import Endpoints
from launcher.errors import ClusterNotFound, LauncherError, RunNotFound
from launcher.files import select
from launcher.lease import describe_lease
from launcher.project import prepared
from launcher.provider import (
    CLUSTER_STATE_DIR,
    PROLOGUE,
    SERVER,
    ClusterInfo,
    Cost,
    Progress,
    Provider,
    Run,
    Sent,
    live_server,
)
from launcher.settings import Settings, read
from launcher.startup import (
    BackgroundContext,
    already_running,
    naming_the_cluster,
    wait_for_server,
    write_price,
)
from launcher.state import add_secret_names, launch_lock, read_ports, secret_names, write_ports
from launcher.task import Task, secret_values
from launcher.workers import Workers

# The log file for each name that `logs` accepts for a process of the server.
_PROCESSES = {"engine": "engine", "vllm": "engine", "learner": "learner"}


class Cluster:
    """A named cluster. Creating the object does nothing; each method is one operation.

        cluster = Cluster("art")
        cluster.up(Task.load(Path("sky/art-cpu.yaml"), cluster.settings))
        with cluster.tunnel() as endpoints:
            ...
        cluster.down(Path("checkpoints"))

    SkyPilot rents the cluster unless another provider is given; `LocalProvider()` uses this
    machine.
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
            from launcher.skypilot.provider import SkyProvider  # SkyPilot takes seconds to import

            self._provider = SkyProvider()
        return self._provider

    def up(
        self,
        task: Task,
        arguments: Sequence[str] = (),
        *,
        progress: Callable[[str], None] = lambda message: None,
        log: TextIO | None = None,
        interval: float = 15.0,
        options: Sequence[str] = (),
    ) -> bool:
        """Bring the cluster up, start the task and wait until its server is healthy.

        Safe to repeat: a server that is running is not started again. `progress` then lists the
        `arguments` for `sky launch` and the launcher's own `options` that have no effect.

        Checks that the server is still alive every `interval` seconds. After the first check,
        `log` receives the output of setup and server. Returns False if `arguments` request a dry
        run.
        """
        with launch_lock(self.name), naming_the_cluster(self.provider, self.name, progress):
            server = self._server() or self.provider.resume(self.name)
            record = self.provider.ports_record(self.name)
            ports = (read_ports(record) if server else None) or task.ports
            with BackgroundContext(lambda: self._tunnel(ports)) as tunnel:
                if server is None:
                    sent = prepared(task, progress)
                    add_secret_names(self.name, task.secrets)
                    progress(describe_lease(task.envs, task.max_cost))
                    record.unlink(missing_ok=True)  # an earlier cluster's, if that ended by itself
                    # Opening ssh takes seconds, and so does the rest of a launch: do both at once.
                    server = self.provider.launch(
                        self.name, sent, arguments, reachable=tunnel.start
                    )
                    if server is None:
                        return False
                else:
                    progress(already_running(self.name, server, task, [*arguments, *options]))
                write_ports(record, ports)
                wait_for_server(self.provider, self.name, server, tunnel, progress, log, interval)
                write_price(self.provider, self.name, self.cost)
        return True

    @property
    def ports(self) -> tuple[int, int]:
        """The server's ports on the cluster: as recorded by `up`, otherwise from the settings."""
        recorded = read_ports(self.provider.ports_record(self.name))
        return recorded or (self.settings.port, self.settings.openai_port)

    def sync(self, workdir: Path = Path(), files: Sequence[str] | None = None) -> Sent:
        """Update the cluster's copy of `workdir`: send changed files, delete removed ones.

        By default `files` are all that the ignore files do not exclude.
        """
        return self.provider.sync(self.name, workdir, select(workdir) if files is None else files)

    def run(self, command: str) -> Run:
        """Start `command` in the workdir, with its environment active, while the server runs."""
        envs = Endpoints.on_loopback(*self.ports).exports()
        if self.settings.langfuse_host:  # the address that the Langfuse keys are for
            envs |= {"LANGFUSE_HOST": self.settings.langfuse_host}
        return self.provider.run(self.name, PROLOGUE + command, envs, self.settings.secrets())

    def wait(self, run: Run, *, interval: float = 2.0) -> int:
        """Wait until `run` is over and return its exit code."""
        while not self._run(run.id).status.over:
            time.sleep(interval)
        return self.provider.exit_code(self.name, run.id)

    def cancel(self, run_id: str) -> bool:
        """Stop a run. Returns False if it was already over."""
        if self._run(run_id).status.over:
            return False
        self.provider.cancel(self.name, run_id)
        return True

    def logs(
        self,
        run_id: str | None = None,
        *,
        follow: bool = False,
        tail: int = 0,
        out: TextIO | None = None,
    ) -> None:
        """Write the output of a run, by default the newest, to `out`, by default stdout.

        `server` is the run of the task itself. `engine` (or `vllm`) and `learner` are processes
        of the server with separate log files.
        """
        out = out or sys.stdout
        if run_id in _PROCESSES:
            path = f"{CLUSTER_STATE_DIR}/{LOGS}/{_PROCESSES[run_id]}.log"
            self.provider.read(self.name, path, follow=follow, tail=tail, out=out)
            return
        if run_id not in (None, SERVER) and not run_id.isdecimal():
            raise self._no_run(run_id)
        self.provider.logs(self.name, run_id, follow=follow, tail=tail, out=out)

    def bundle(self, to: Path, *, env_file: Path | None = None) -> list[str]:
        """Pack all logs, the metrics and the plots of packed rows into `to`, without secrets.

        Hides the launcher's secrets, and those of the cluster's tasks that are still set in the
        environment or `env_file`. Returns the names of the packed files.
        """
        task_secrets = secret_values(secret_names(self.name), self.settings, env_file)
        secrets = {**self.settings.secrets(), **task_secrets}
        return bundle.pack(self.provider, self.name, to, list(secrets.values()))

    def pull(
        self, to: Path, *, progress: Progress = lambda received, share: None
    ) -> list[PulledCheckpoint]:
        """Copy new checkpoints and metrics to `to`, and check every file against its sha256."""
        return checkpoints.pull(self.provider, self.name, to, progress)

    def tunnel(
        self, port: int = 0, openai_port: int = 0
    ) -> contextlib.AbstractContextManager[Endpoints]:
        """Make both ports of the server reachable on this machine; 0 is any free port."""
        return self._tunnel(self.ports, port, openai_port)

    def status(self) -> ClusterInfo | None:
        """The cluster as its provider sees it, or None if there is none."""
        return next((it for it in self.provider.clusters() if it.name == self.name), None)

    def runs(self) -> list[Run]:
        return self.provider.runs(self.name)

    @property
    def workers(self) -> Workers:
        """Machines that lend engines to the server, each a cluster of its own."""
        return Workers(self.name, self.provider, self.settings)

    def scale(
        self,
        workers: int,
        *,
        spot: bool = False,
        gpus: str | None = None,
        progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Add workers until there are this many, or remove some, while the server runs.

        `spot` and `gpus`, by default those of the server's machines, are for new workers.
        """
        self.workers.scale(workers, spot=spot, gpus=gpus, progress=progress)
        write_price(self.provider, self.name, self.cost)

    def costs(self) -> dict[str, Cost]:
        """The cost of the cluster and of each of its workers, by name."""
        return {self.name: self.provider.cost(self.name), **self.workers.costs()}

    def cost(self) -> Cost:
        """The cost of the cluster with its workers. Workers that were removed do not count."""
        return Cost.total(self.costs().values())

    def watch(self, to: Path, *, interval: float = 15.0) -> Iterator[list[PulledCheckpoint]]:
        """Pull every `interval` seconds until the newest run is over.

        Yields each pull that fetched something.
        """
        if runs := self.runs():
            yield from checkpoints.watch(
                lambda: self._run(runs[-1].id).status.over, lambda: self.pull(to), interval
            )

    def down(
        self, pull_to: Path | None, *, progress: Progress = lambda received, share: None
    ) -> tuple[list[PulledCheckpoint], Cost | None]:
        """Pull the checkpoints to `pull_to`, then tear the cluster down; None discards them.

        Its workers go first. Returns the pulled checkpoints, and the cost if there was a cluster.
        """
        status = self.status()
        pulled: list[PulledCheckpoint] = []
        # A cluster that is still `init` was never up, so it has no checkpoints.
        if pull_to is not None and status is not None and status.status != "init":
            try:
                pulled = checkpoints.pull_until_complete(
                    lambda: self.pull(pull_to, progress=progress)
                )
            except LauncherError as error:
                down = f"launcher down{self.provider.option} -c {self.name} --discard"
                discard = f"or discard them with `{down}`"
                raise type(error)(error.message, hint=f"{error.hint}; {discard}") from error
        spent = None
        if status is not None:
            with contextlib.suppress(LauncherError):  # an unknown cost must not keep it up
                spent = self.cost()
        with contextlib.ExitStack() as last_first:  # whatever fails, it ends the others too
            last_first.callback(self.provider.down, self.name)
            for worker in self.workers.names():
                last_first.callback(self.provider.down, worker)
        return pulled, spent

    @contextlib.contextmanager
    def _tunnel(
        self, ports: tuple[int, int], port: int = 0, openai_port: int = 0
    ) -> Iterator[Endpoints]:
        requested = dict(zip(ports, (port, openai_port), strict=True))
        with self.provider.tunnel(self.name, requested) as local:
            yield Endpoints.on_loopback(*(local[port] for port in ports))

    def _server(self) -> Run | None:
        status = self.status()
        if status is None or status.status != "up":
            return None
        with contextlib.suppress(ClusterNotFound):
            return live_server(self.provider.runs(self.name))
        return None

    def _run(self, run_id: str) -> Run:
        for run in self.provider.runs(self.name):
            if run.id == run_id:
                return run
        raise self._no_run(run_id)

    def _no_run(self, run_id: str) -> RunNotFound:
        return RunNotFound(
            f"Cluster `{self.name}` has no run `{run_id}`",
            hint=f"List its runs with `launcher ls{self.provider.option} -c {self.name}`",
        )
