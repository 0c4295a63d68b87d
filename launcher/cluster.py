"""`Cluster`: the verbs, on a named cluster of any provider."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from kit.state_dir import LOGS
from launcher import bundle, checkpoints
from launcher.checkpoints import PulledCheckpoint
from launcher.endpoints import Endpoints, is_healthy
from launcher.errors import ClusterNotFound, LauncherError, RunNotFound
from launcher.files import select
from launcher.lease import describe_lease
from launcher.provider import (
    CLUSTER_STATE_DIR,
    SERVER,
    ClusterInfo,
    Cost,
    Progress,
    Provider,
    Run,
    RunStatus,
    Sent,
    live_server,
)
from launcher.settings import Settings, read
from launcher.startup import Early, Showing, ended_early, kept
from launcher.state import (
    add_secret_names,
    launch_lock,
    read_ports,
    secret_names,
    write_ports,
)
from launcher.task import Task, secret_values

# Logs of the server's processes, by what one may call them.
_PROCESSES = {"engine": "engine", "vllm": "engine", "learner": "learner"}
# `run` starts in the synced workdir with its environment active, whatever the provider.
_PROLOGUE = "cd ~/sky_workdir\nif [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi\n"


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
        every: float = 15.0,
        given: Sequence[str] = (),
    ) -> bool:
        """Bring the cluster up, start the task and wait until its server is healthy.

        Safe to repeat: a server that is alive is waited for as it is, not started twice; what is
        `given` besides the `arguments` for `sky launch` is then said to have no effect, as they
        are. `every` so many seconds it is looked whether it still is; from then on `log` shows
        what setup and server say. False when the `arguments` asked for a rehearsal.
        """
        with launch_lock(self.name):
            server = self._server() or self.provider.resume(self.name)
            record = self.provider.ports_record(self.name)
            ports = (read_ports(record) if server else None) or task.ports
            with Early(lambda: self._tunnel(ports)) as tunnel:
                if server is None:
                    add_secret_names(self.name, task.secrets)
                    progress(describe_lease(task.envs, task.max_cost))
                    record.unlink(missing_ok=True)  # of an earlier cluster, which ended by itself
                    # An ssh takes seconds to open, and so does what is left to do of a launch.
                    server = self.provider.launch(
                        self.name, task, arguments, reachable=tunnel.begin
                    )
                    if server is None:
                        return False
                else:
                    progress(kept(self.name, server, task, [*arguments, *given]))
                write_ports(record, ports)
                self._wait_until_healthy(server.id, tunnel, progress, log, every)
        return True

    @property
    def ports(self) -> tuple[int, int]:
        """Where the server listens on its cluster: as launched from here, or by the settings."""
        noted = read_ports(self.provider.ports_record(self.name))
        return noted or (self.settings.port, self.settings.openai_port)

    def sync(self, workdir: Path = Path(), files: Sequence[str] | None = None) -> Sent:
        """Bring the cluster's copy of `workdir` up to date: what changed, and what is gone.

        `files` are those that go, by default what the ignore files leave.
        """
        return self.provider.sync(self.name, workdir, select(workdir) if files is None else files)

    def run(self, command: str) -> Run:
        """Start `command` beside the server, in the workdir with its environment active."""
        envs = Endpoints.on_loopback(*self.ports).exports()
        if self.settings.langfuse_host:  # where its keys, which are secrets, are good
            envs |= {"LANGFUSE_HOST": self.settings.langfuse_host}
        return self.provider.run(self.name, _PROLOGUE + command, envs, self.settings.secrets())

    def wait(self, run: Run, *, every: float = 2.0) -> int:
        """Wait until `run` is over and return its exit code."""
        while not self._run(run.id).status.over:
            time.sleep(every)
        return self.provider.exit_code(self.name, run.id)

    def cancel(self, run_id: str) -> bool:
        """End a run; False when it was over already."""
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
        """Write the output of a run, by default the newest, to `out` (stdout).

        `server` is the run of the task itself; `engine` (or `vllm`) and `learner` are processes
        of the server, which write files of their own.
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
        """Pack every log, the metrics and the pictures of packed rows into `to`, secrets blacked.

        Ours, and those of the cluster's tasks that the environment or `env_file` still give.
        Returns the names of the packed files.
        """
        own = secret_values(secret_names(self.name), self.settings, env_file)
        secrets = {**self.settings.secrets(), **own}
        return bundle.pack(self.provider, self.name, to, list(secrets.values()))

    def pull(
        self, to: Path, *, progress: Progress = lambda arrived, share: None
    ) -> list[PulledCheckpoint]:
        """Bring checkpoints and metrics home; what is here already is not sent again.

        Every file of a checkpoint is checked against its sha256.
        """
        return checkpoints.pull(self.provider, self.name, to, progress)

    def tunnel(
        self, port: int = 0, openai_port: int = 0
    ) -> contextlib.AbstractContextManager[Endpoints]:
        """Make both ports of the server reachable on this machine; 0 is any free port."""
        return self._tunnel(self.ports, port, openai_port)

    def status(self) -> ClusterInfo | None:
        """The cluster as its provider sees it, or None."""
        return next((it for it in self.provider.clusters() if it.name == self.name), None)

    def runs(self) -> list[Run]:
        return self.provider.runs(self.name)

    def cost(self) -> Cost:
        return self.provider.cost(self.name)

    def watch(self, to: Path, *, every: float = 15.0) -> Iterator[list[PulledCheckpoint]]:
        """Pull again and again until the newest run is over; gives each pull that brought some."""
        if runs := self.runs():
            yield from checkpoints.watch(
                lambda: self._run(runs[-1].id).status.over, lambda: self.pull(to), every
            )

    def down(
        self, pull_to: Path | None, *, progress: Progress = lambda arrived, share: None
    ) -> tuple[list[PulledCheckpoint], Cost | None]:
        """End the cluster, after its checkpoints are safe in `pull_to`; None discards them.

        Returns what is safe and what the cluster cost, None where there was none.
        """
        status = self.status()
        pulled: list[PulledCheckpoint] = []
        # What is half made was never up, so nothing can be there.
        if pull_to is not None and status is not None and status.status != "init":
            try:
                pulled = checkpoints.all_of(lambda: self.pull(pull_to, progress=progress))
            except LauncherError as error:
                lose = f"or lose what is there with `launcher down -c {self.name} --discard`"
                raise type(error)(error.message, hint=f"{error.hint}; {lose}") from error
        spent = None
        if status is not None:
            with contextlib.suppress(LauncherError):  # no bill keeps a cluster up
                spent = self.cost()
        self.provider.down(self.name)
        return pulled, spent

    @contextlib.contextmanager
    def _tunnel(
        self, ports: tuple[int, int], port: int = 0, openai_port: int = 0
    ) -> Iterator[Endpoints]:
        wanted = dict(zip(ports, (port, openai_port), strict=True))
        with self.provider.tunnel(self.name, wanted) as local:
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
            hint=f"List its runs with `launcher ls -c {self.name}`",
        )

    def _wait_until_healthy(
        self,
        run_id: str,
        tunnel: Early[Endpoints],
        progress: Callable[[str], None],
        log: TextIO | None,
        every: float,
    ) -> None:
        """As long as the run is alive: setup takes what the machine and its network need."""
        started = time.monotonic()
        with Showing(
            lambda out: self.provider.logs(self.name, run_id, follow=True, tail=0, out=out)
        ) as showing:
            while True:
                endpoints, look = tunnel.value(), time.monotonic() + every
                while time.monotonic() < look:
                    if is_healthy(endpoints):
                        return
                    time.sleep(0.3)
                status = self._run(run_id).status
                if status.over:
                    raise ended_early(self.provider, self.name, run_id)
                where = "waits for its turn" if status is RunStatus.PENDING else "is being set up"
                progress(f"The server {where} ({time.monotonic() - started:.0f} s)")
                if log is not None and status is not RunStatus.PENDING:
                    showing.start(log)
