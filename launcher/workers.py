"""Workers: machines that lend engines to the server of a cluster, each a cluster of its own.

They join the Ray head of the server (`scripts/ray-cluster`). They hold no state, so they may be
spot machines, and come and go while the server runs.
"""

import re
import time
from collections.abc import Callable

from pydantic import SecretStr

from launcher.errors import LauncherError
from launcher.packaged import find_task
from launcher.project import prepared
from launcher.provider import Cost, Provider, live_server
from launcher.ray_head import RayHead, no_ray, read_ray_head
from launcher.settings import Settings
from launcher.startup import naming_the_cluster
from launcher.state import add_secret_names, launch_lock
from launcher.task import Task

HEAD_TASK, TASK = "sky/art-multi-node.yaml", "sky/art-worker.yaml"
"""The tasks of a server that workers can join, and of a worker."""


class Workers:
    """The workers of the cluster `head`. Each is named after it: `art-worker-1` of `art`."""

    def __init__(self, head: str, provider: Provider, settings: Settings) -> None:
        self.head = head
        self._provider = provider
        self._settings = settings

    def name(self, number: int) -> str:
        return f"{self.head}-worker-{number}"

    def statuses(self) -> dict[int, str]:
        """The status of every worker that exists, by its number."""
        pattern = re.compile(rf"{re.escape(self.head)}-worker-([1-9]\d*)")
        found = [(pattern.fullmatch(it.name), it.status) for it in self._provider.clusters()]
        return dict(sorted((int(match[1]), status) for match, status in found if match))

    def names(self) -> list[str]:
        return [self.name(number) for number in self.statuses()]

    def costs(self) -> dict[str, Cost]:
        return {name: self._provider.cost(name) for name in self.names()}

    def scale(
        self, count: int, *, spot: bool, gpus: str | None, progress: Callable[[str], None]
    ) -> None:
        """Add workers until there are `count`, or remove those with the highest numbers.

        `spot` and `gpus` apply to new workers only. A worker whose part has ended is started again.
        """
        with launch_lock(f"{self.head}-workers"):
            statuses = self.statuses()
            for number in sorted((it for it in statuses if it > count), reverse=True):
                progress(f"Removing worker `{self.name(number)}`")
                self._provider.down(self.name(number))
            wanted = range(1, count + 1)
            missing = [it for it in wanted if not self._runs(self.name(it), statuses.get(it))]
            if missing:
                self._add(missing, count, spot, gpus, progress)

    def _runs(self, name: str, status: str | None) -> bool:
        """Whether a worker runs, after any launch of it that was interrupted."""
        if status == "up" and live_server(self._provider.runs(name)):
            return True
        return status is not None and self._provider.resume(name) is not None

    def _add(
        self,
        numbers: list[int],
        count: int,
        spot: bool,
        gpus: str | None,
        progress: Callable[[str], None],
    ) -> None:
        ray_head = read_ray_head(self._provider, self.head)
        if ray_head is None:
            raise no_ray(self.head, "no worker can join it")
        task = prepared(self._task(ray_head), progress)
        arguments = self._provider.like(self.head)
        # The last of two options of the same name counts.
        arguments += [*(["--gpus", gpus] if gpus else []), *(["--use-spot"] if spot else [])]
        for done, number in enumerate(numbers):
            name = self.name(number)
            progress(f"Launching worker `{name}`" + " on a spot machine" * spot)
            add_secret_names(name, task.secrets)
            try:
                with naming_the_cluster(self._provider, name, progress):
                    self._provider.launch(name, task, arguments)
            except LauncherError as error:
                have = count - len(numbers) + done
                hint = f"{have} of {count} workers run; repeat the command to add the others"
                raise type(error)(
                    error.message, hint=f"{error.hint}. {hint}" if error.hint else hint
                ) from error
            progress(
                f"Worker `{name}` joins as soon as it is set up: `launcher logs server -c {name}`"
            )

    def _task(self, ray_head: RayHead) -> Task:
        key = SecretStr(ray_head.key)
        # The bucket is for the server's state, and a worker has none.
        settings = self._settings.model_copy(update={"art_api_key": key, "bucket": None})
        # A worker follows the server. Its own limit is for a server that hangs.
        ends, hours = self._provider.cost(self.head).lease_ends, 0.0
        if ends is not None:
            hours = max((ends - time.time()) / 3600, 0.1)
        limits = {"ART_MAX_HOURS": f"{hours:g}", "ART_IDLE_MINUTES": "0"}
        dashboard = "0" if ray_head.dashboard is None else "1"
        envs = {"HEAD": ray_head.address, "ENGINE": ray_head.engine, "RAY_DASHBOARD": dashboard}
        return Task.load(find_task(TASK), settings, envs=envs | limits)
