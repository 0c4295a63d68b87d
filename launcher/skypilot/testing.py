"""`FakeSky`: SkyPilot in memory, for tests of what is built on it. See `door.replaced`.

Calls return request ids, and `get` returns the result or raises the error, as with the real one. A
contract test checks that every call here also exists there, with the same parameters.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import yaml

from launcher.skypilot import door

_NOT_FOUND = 102  # of `sky.exceptions.JobExitCode`


class FakeStatus(Enum):
    """Statuses of clusters, jobs and managed jobs, under SkyPilot's names."""

    UP = "UP"
    INIT = "INIT"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    CANCELLED = "CANCELLED"

    def is_terminal(self) -> bool:
        return self.value in ("SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED")


@dataclass
class FakeJob:
    """A job of a cluster, or a managed job."""

    name: str | None
    status: FakeStatus = FakeStatus.PENDING
    log: str = ""
    exit_code: int = 0
    """The code that `tail_logs` returns."""


class FakeQueue(dict[int, FakeJob]):
    """Jobs by their id."""

    def add(self, job: FakeJob) -> int:
        job_id = max(self, default=0) + 1
        self[job_id] = job
        return job_id

    def rows(self) -> list[dict[str, Any]]:
        """Newest first."""
        return [
            {"job_id": job_id, "job_name": self[job_id].name, "status": self[job_id].status}
            for job_id in sorted(self, reverse=True)
        ]

    def cancel(self, job_ids: Sequence[int] | None) -> None:
        for job_id in job_ids or ():
            self[job_id].status = FakeStatus.CANCELLED

    def tail(self, job_id: int, out: TextIO | None) -> int:
        if job_id not in self:
            return _NOT_FOUND
        assert out is not None
        try:
            out.write(self[job_id].log)
        except Exception as error:  # SkyPilot would connect again, whatever the reason
            raise ConnectionError("the connection to the API server is lost") from error
        return self[job_id].exit_code


@dataclass
class FakeRequest:
    """A request to the API server."""

    request_id: str
    name: str
    cluster_name: str | None = None
    finished: bool = True
    result: Any = None
    error: Exception | None = None


class ClusterDoesNotExist(Exception):
    pass


class ClusterNotUpError(Exception):
    pass


@dataclass
class FakeTask:
    """SkyPilot's `Task`, as the mapping that it was made of."""

    config: dict[str, Any]

    @classmethod
    def from_yaml_config(
        cls,
        config: dict[str, Any],
        env_overrides: list[tuple[str, str]] | None = None,
        secrets_overrides: list[tuple[str, str]] | None = None,
    ) -> "FakeTask":
        task = cls(dict(config))
        config.clear()  # as the real one does
        return task


@dataclass
class FakeSky:
    """The part of SkyPilot's SDK that we use, with every call on record."""

    clouds: Sequence[str] = ("aws",)
    """Enabled clouds. The first one gets every new cluster."""
    cpus: str | None = "4"
    memory: str | None = "8"
    accelerators: dict[str, int] | None = None
    nodes: int = 1
    records: dict[str, Any] = field(default_factory=dict)
    """The records that `status` returns, by cluster."""
    queues: dict[str, FakeQueue] = field(default_factory=dict)
    """The jobs of each cluster."""
    managed: FakeQueue = field(default_factory=FakeQueue)
    costs: list[dict[str, Any]] = field(default_factory=list)
    """The rows that `cost_report` returns."""
    catalogs: dict[str, list[SimpleNamespace]] = field(default_factory=dict)
    """What each cloud offers, as `InstanceTypeInfo`; the catalog of another cloud is missing."""
    requests: list[FakeRequest] = field(default_factory=list)
    launched: list[SimpleNamespace] = field(default_factory=list)
    """Calls of `sky launch`: the task's `config`, and the `options` by parameter name."""
    executed: list[dict[str, Any]] = field(default_factory=list)
    """Configs of the tasks that `exec` started."""
    tailed: list[tuple[int | None, bool, int | None]] = field(default_factory=list)
    """`job_id`, `follow` and `tail` of every log that was read."""
    downs: list[dict[str, Any]] = field(default_factory=list)
    """Options of every `down`."""

    StatusRefreshMode = SimpleNamespace(NONE="NONE", AUTO="AUTO")
    exceptions = SimpleNamespace(ClusterNotUpError=ClusterNotUpError)
    Task = FakeTask

    def __post_init__(self) -> None:
        self.jobs = FakeManagedJobs(self)
        self.client = SimpleNamespace(sdk=self, cli=SimpleNamespace(command=FakeCommands(self)))
        helper = SimpleNamespace(remove_cluster=lambda cluster_name: None)
        self.utils = SimpleNamespace(cluster_utils=SimpleNamespace(SSHConfigHelper=helper))

    def make_cluster(self, name: str, status: FakeStatus = FakeStatus.UP, **record: Any) -> None:
        """Add a cluster; `record` replaces parts of what `status` returns for it."""
        size = {"cpus": self.cpus, "memory": self.memory, "accelerators": self.accelerators}
        size |= {"cloud": self.clouds[0], "region": "here"}
        self.records[name] = {
            "name": name,
            "status": status,
            "handle": SimpleNamespace(
                launched_resources=SimpleNamespace(**size), launched_nodes=self.nodes
            ),
            "cluster_ever_up": status is FakeStatus.UP,
            "last_creation_yaml": None,
            **record,
        }
        self.queues.setdefault(name, FakeQueue())

    def queue_of(self, cluster: str) -> FakeQueue:
        if cluster not in self.records:
            raise ClusterDoesNotExist(f"Cluster {cluster!r} does not exist.")
        return self.queues[cluster]

    def request(self, name: str, cluster: str | None, work: Callable[[], Any]) -> str:
        """Do the work of a request now, and keep its result or error for `get`."""
        made = FakeRequest(f"request-{len(self.requests) + 1}", name, cluster)
        self.requests.append(made)
        try:
            made.result = work()
        except Exception as error:
            made.error = error
        return made.request_id

    def get(self, request_id: str) -> Any:
        (found,) = [it for it in self.requests if it.request_id == request_id]
        found.finished = True
        if found.error is not None:
            raise found.error
        return found.result

    def stream_and_get(self, request_id: str) -> Any:
        return self.get(request_id)

    def api_status(
        self, *, cluster_name: str, all_status: bool = False, limit: int | None = None
    ) -> list[FakeRequest]:
        """Newest first. Like an older API server it ignores `cluster_name`."""
        return [it for it in self.requests[::-1] if all_status or not it.finished][:limit]

    def enabled_clouds(self) -> str:
        return self.request("enabled_clouds", None, lambda: list(self.clouds))

    def list_accelerators(self, gpus_only: bool = True, clouds: list[str] | None = None) -> str:
        def listed() -> dict[str, list[SimpleNamespace]]:
            offers = [offer for cloud in clouds or () for offer in self.catalogs[cloud]]
            return {
                name: [one for one in offers if one.accelerator_name == name]
                for name in {one.accelerator_name for one in offers}
            }

        return self.request("list_accelerators", None, listed)

    def status(self, cluster_names: list[str] | None = None, refresh: str = "NONE") -> str:
        names = list(self.records) if cluster_names is None else cluster_names
        found = [self.records[name] for name in names if name in self.records]
        return self.request("sky.status", None, lambda: found)

    def queue(self, cluster_name: str) -> str:
        return self.request("sky.queue", cluster_name, lambda: self.queue_of(cluster_name).rows())

    def exec(self, task: FakeTask, cluster_name: str) -> str:
        def start() -> tuple[int, None]:
            self.executed.append(task.config)
            return self.queue_of(cluster_name).add(FakeJob(task.config["name"])), None

        return self.request("sky.exec", cluster_name, start)

    def tail_logs(
        self,
        cluster_name: str,
        job_id: int | None,
        follow: bool,
        tail: int = 0,
        output_stream: TextIO | None = None,
    ) -> int:
        self.tailed.append((job_id, follow, tail))
        queue = self.queue_of(cluster_name)
        return queue.tail(max(queue) if job_id is None else job_id, output_stream)

    def cancel(self, cluster_name: str, *, job_ids: list[int] | None = None) -> str:
        queue = self.queue_of(cluster_name)
        return self.request("sky.cancel", cluster_name, lambda: queue.cancel(job_ids))

    def cost_report(self) -> str:
        return self.request("sky.cost_report", None, lambda: self.costs)

    def down(self, cluster_name: str, *, graceful: bool, graceful_timeout: int) -> str:
        def end() -> None:
            self.queue_of(cluster_name).clear()
            self.downs.append({"graceful": graceful, "graceful_timeout": graceful_timeout})
            del self.records[cluster_name]

        return self.request("sky.down", cluster_name, end)


class FakeManagedJobs:
    """`sky.jobs`. Its controller exists once there is a managed job."""

    def __init__(self, sky: FakeSky) -> None:
        self._sky = sky

    def launch(self, task: FakeTask, name: str | None = None) -> str:
        self._sky.launched.append(SimpleNamespace(config=task.config, options={"name": name}))
        return self._sky.request(
            "sky.jobs.launch", None, lambda: ([self._sky.managed.add(FakeJob(name))], None)
        )

    def queue_v2(self, refresh: bool, *, job_ids: Sequence[int] | None = None) -> str:
        def rows() -> tuple[list[dict[str, Any]], int]:
            if not self._sky.managed:
                raise ClusterNotUpError("The controller of managed jobs is not up.")
            all_rows = self._sky.managed.rows()
            found = [row for row in all_rows if job_ids is None or row["job_id"] in job_ids]
            return found, len(found)

        return self._sky.request("sky.jobs.queue_v2", None, rows)

    def tail_logs(
        self, *, job_id: int, follow: bool, tail: int | None, output_stream: TextIO
    ) -> int:
        self._sky.tailed.append((job_id, follow, tail))
        return self._sky.managed.tail(job_id, output_stream)

    def cancel(self, *, job_ids: Sequence[int] | None = None) -> str:
        return self._sky.request("sky.jobs.cancel", None, lambda: self._sky.managed.cancel(job_ids))


class FakeCommands:
    """`sky.client.cli.command`: SkyPilot's own parser of `sky launch`, and a launch in memory."""

    def __init__(self, sky: FakeSky) -> None:
        self._sky = sky

    @property
    def launch(self) -> Any:
        command = copy.copy(door.installed("client.cli.command").launch)
        command.callback = self._launch
        return command

    def _launch(self, **options: Any) -> None:
        (path,) = options["entrypoint"]
        config, cluster = yaml.safe_load(Path(path).read_text()), options["cluster"]
        self._sky.launched.append(SimpleNamespace(config=config, options=options))

        def start() -> tuple[int | None, None]:
            self._sky.make_cluster(cluster)
            job = FakeJob(options["name"] or config.get("name"))
            has_job = "run" in config or "setup" in config
            return self._sky.queues[cluster].add(job) if has_job else None, None

        if not options["dryrun"]:
            self._sky.get(self._sky.request("sky.launch", cluster, start))
