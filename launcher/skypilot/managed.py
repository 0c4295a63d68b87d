"""Managed runs: a command and its server on a separate cluster, which SkyPilot replaces if lost.

The server's state has to outlive a cluster. It is in the bucket that `.env` names, or in a
directory that all clusters share. A command that gets the current step from the server, as ART's
clients do, then continues from the last checkpoint.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.state_dir import STATE_DIR
from launcher.endpoints import Endpoints
from launcher.errors import LauncherError, ProviderError, TaskError
from launcher.files import refuse_unignored_env_file, sendable
from launcher.provider import ACTIVATE, CLUSTER_STATE_DIR, WORKDIR, Run, RunStatus
from launcher.settings import Settings
from launcher.shipping import with_kit
from launcher.skypilot.door import log_stream, sky, translated
from launcher.task import Task

# Any other status that is not final means that SkyPilot is bringing up a cluster: pending.
_STATUS = {
    "RUNNING": RunStatus.RUNNING,
    "WINDING_DOWN": RunStatus.RUNNING,
    "CANCELLING": RunStatus.RUNNING,
    "SUCCEEDED": RunStatus.SUCCEEDED,
    "CANCELLED": RunStatus.CANCELLED,
}
# In a subshell: SkyPilot appends commands that wait for uploads to a bucket, and keeps the code.
_SCRIPT = """\
(
mkdir -p ~/{workdir} && cd ~/{workdir} || exit 1
{state}
[ ! -f .venv/bin/activate ] || . .venv/bin/activate
set -m  # server and command each lead a process group, which is killed as a whole
( {server}
) & server=$!
trap 'kill -- -$server 2>/dev/null; wait $server' EXIT
for port in {ports}; do
  until (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null; do
    if ! kill -0 $server 2>/dev/null; then
      echo "The server exited before the command started" >&2
      exit 1
    fi
    sleep 1
  done
done
( {activate}
bash -c {command} ) & command=$!
wait -n $server $command
code=$?
if kill -0 $command 2>/dev/null; then
  echo "The server exited before the command" >&2
  kill -- -$command
  exit 1
fi
exit $code
)
"""


def start(task: Task, command: str, settings: Settings, *, state_dir: str | None) -> str:
    """Start `command` and the task's server on a new cluster, and return the run's id."""
    config = _config(with_kit(task), command, settings, state_dir)
    refuse_unignored_env_file(config.get("workdir"))
    if isinstance(config.get("workdir"), str):
        config["workdir"] = sendable(task.name, Path(config["workdir"]))
    skypilot = sky()
    with translated(task.name):
        job = skypilot.Task.from_yaml_config(
            config,
            env_overrides=list(task.envs.items()),
            secrets_overrides=list(task.secrets.items()),
        )
        # Not `stream_and_get`, which ends with an escape sequence on stdout.
        ids, _ = skypilot.get(skypilot.jobs.launch(job, name=task.name))
    if not ids:
        raise ProviderError("SkyPilot returned no id for the managed run")
    return str(ids[0])


def wait(run_id: str) -> bool:
    """Show the output of a managed run until it is over, and return whether it succeeded."""
    logs(run_id, follow=True)
    while not (run := _run(run_id)).status.over:
        time.sleep(5)  # SkyPilot is replacing its cluster
    return run.status is RunStatus.SUCCEEDED


def runs() -> list[Run]:
    """All managed runs that SkyPilot has on record, oldest first."""
    return _runs(refresh=False)


def logs(run_id: str | None, *, follow: bool, tail: int = 0) -> None:
    """Write the output of a managed run, by default the newest, to stdout."""
    if run_id is None:
        if not (known := runs()):
            raise LauncherError(
                "There are no managed runs yet",
                hint="Start one with `launcher run --managed COMMAND`",
            )
        run_id = known[-1].id
    else:
        _run(run_id)
    skypilot = sky()
    with log_stream(sys.stdout) as out, translated(run_id):
        skypilot.jobs.tail_logs(
            job_id=int(run_id), follow=follow, tail=tail or None, output_stream=out
        )


def cancel(run_id: str) -> bool:
    """End a managed run and its cluster; False when it was over already."""
    if _run(run_id).status.over:
        return False
    skypilot = sky()
    with translated(run_id):
        skypilot.get(skypilot.jobs.cancel(job_ids=[int(run_id)]))
    return True


def _run(run_id: str) -> Run:
    found = _runs(refresh=True, ids=[int(run_id)]) if run_id.isdecimal() else []
    if not found:
        raise LauncherError(
            f"There is no managed run `{run_id}`", hint="List them with `launcher ls --managed`"
        )
    return found[0]


def _runs(*, refresh: bool, ids: Sequence[int] | None = None) -> list[Run]:
    skypilot = sky()
    with translated("managed"):
        try:
            queue = skypilot.jobs.queue_v2(refresh=refresh, job_ids=ids)
            records, *_ = skypilot.get(queue)
        except skypilot.exceptions.ClusterNotUpError:
            return []  # no managed run was ever started, so their controller is not up
    return [
        Run(str(record["job_id"]), record["job_name"], _status(record["status"]))
        for record in sorted(records, key=lambda record: int(record["job_id"]))
    ]


def _status(status: Any) -> RunStatus:
    other = RunStatus.FAILED if status.is_terminal() else RunStatus.PENDING
    return _STATUS.get(status.value, other)


def _config(task: Task, command: str, settings: Settings, state_dir: str | None) -> dict[str, Any]:
    config = dict(task.config)
    if (nodes := config.get("num_nodes") or 1) > 1:
        raise TaskError(
            f"`{task.path}` requests {nodes} machines, but a managed run has one",
            hint="Use the task `art` or `art-multi-gpu`, or leave `--managed` out",
        )
    mounts = dict(config.get("file_mounts") or {})
    state = ""
    if state_dir is not None:
        if not state_dir.startswith("/"):
            raise LauncherError(
                f"`--state-dir` is `{state_dir}`, which other clusters would not find",
                hint="Give an absolute path on a disk that all of them share",
            )
        mounts.pop(f"~/{CLUSTER_STATE_DIR}", None)
        target = shlex.quote(state_dir)
        state = f"mkdir -p {target} && ln -sfn {target} {STATE_DIR} || exit 1"
    elif f"~/{CLUSTER_STATE_DIR}" not in mounts:
        raise LauncherError(
            "A managed run needs storage that outlives its cluster",
            hint="Set `ART_BUCKET` in `.env`, or give `--state-dir` on a shared disk",
        )
    resources = dict(config.get("resources") or {})
    resources.pop("autostop", None)  # SkyPilot ends the cluster with the run
    resources.setdefault("job_recovery", {"strategy": "FAILOVER"})
    endpoints = Endpoints.on_loopback(settings.port, settings.openai_port)
    exports = "".join(f"export {name}={value}; " for name, value in endpoints.exports().items())
    run = _SCRIPT.format(
        workdir=WORKDIR,
        state=state,
        server=config["run"],
        ports=f"{settings.port} {settings.openai_port}",
        activate=ACTIVATE,
        command=shlex.quote(exports + command),
    )
    return {**config, "file_mounts": mounts, "resources": resources, "run": run}
