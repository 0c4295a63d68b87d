"""Runs on a cluster of SkyPilot's: jobs of its queue, and what they wrote."""

import contextlib
import io
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from launcher.errors import RemoteError, RunNotFound
from launcher.provider import RUN, SERVER, Run, RunStatus, resolve_run_id
from launcher.skypilot.door import reading, sky, translated
from launcher.ssh.remote import Remote

_STATUS = {
    "INIT": RunStatus.PENDING,
    "PENDING": RunStatus.PENDING,
    "SETTING_UP": RunStatus.RUNNING,
    "RUNNING": RunStatus.RUNNING,
    "SUCCEEDED": RunStatus.SUCCEEDED,
    "CANCELLED": RunStatus.CANCELLED,
}
_NOT_FOUND = 102  # of `sky.exceptions.JobExitCode`
_BEGIN = "Waiting for task resources on "
"""In the first line of a log that SkyPilot shows."""


def start(
    name: str, config: dict[str, Any], envs: Mapping[str, str], secrets: Mapping[str, str]
) -> Run:
    """Add a job to the queue of a cluster that is up."""
    skypilot, label = sky(), config["name"]  # SkyPilot empties the mapping it is given
    with translated(name):
        task = skypilot.Task.from_yaml_config(
            config, env_overrides=list(envs.items()), secrets_overrides=list(secrets.items())
        )
        job_id, _ = skypilot.get(skypilot.exec(task, cluster_name=name))
    return Run(str(job_id), label, RunStatus.PENDING)


def runs(name: str) -> list[Run]:
    """See `Provider.runs`."""
    skypilot = sky()
    with translated(name):
        records = skypilot.get(skypilot.queue(name))
    return [
        Run(
            str(record["job_id"]),
            record["job_name"],
            _STATUS.get(record["status"].value, RunStatus.FAILED),
        )
        for record in sorted(records, key=lambda record: int(record["job_id"]))
    ]


def logs(name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
    """See `Provider.logs`. What is there already is read over ssh, in a third of the time.

    SkyPilot knows when a run is over, so it follows; and where ssh finds nothing it says why.
    """
    if follow:
        threading.Thread(target=_import, daemon=True).start()
    found, shown = None, ""
    if run_id == SERVER or not (follow and tail):
        # When SkyPilot comes the last lines may be others, so then it alone shows them.
        found, shown = _read(name, run_id, "0" if follow and tail else str(tail or "+1"))
    if follow:
        shown = shown[: shown.rfind("\n") + 1]  # it shows the rest of a line with its begin
    if shown:
        out.write(shown)
        out.flush()
        if not follow:
            return
    if found is None and run_id == SERVER:
        found = resolve_run_id(SERVER, name, runs(name))
    job_id, skypilot = found or run_id, sky()
    with reading(out) as reader, translated(name):
        code = skypilot.tail_logs(
            name,
            None if job_id is None else int(job_id),
            follow=follow,
            tail=tail,
            output_stream=SkipLines(reader, shown.count("\n")),
        )
    if code == _NOT_FOUND:
        raise RunNotFound(f"Cluster `{name}` has no run `{job_id or 1}`")


def _import() -> None:
    with contextlib.suppress(Exception):  # whoever needs it next says what is wrong
        sky()


def _read(name: str, run_id: str | None, lines: str) -> tuple[str | None, str]:
    """The run and what SkyPilot would show of it, by its file; nothing where that is not to be had.

    SkyPilot keeps the log of a job in `~/sky_logs/ID-NAME`.
    """
    remote = Remote(name)
    if not remote.ssh_config.is_file():
        return None, ""
    logs = f"{int(run_id)}-*" if run_id is not None and run_id != SERVER else "[0-9]*-*"
    only = f"| grep -vxE '[0-9]+-{RUN}'" if run_id == SERVER else ""
    try:
        told = remote.run(
            "cd ~/sky_logs || exit\n"
            f"log=$(ls -d {logs} {only} | sort -n | tail -n 1)\n"
            f'cd "$log" && echo "${{log%%-*}}" && tail --lines={lines} run.log'
        )
    except RemoteError:
        return None, ""
    found, _, text = told.partition("\n")
    if lines != "+1":
        return found, text
    return found, text[text.rfind("\n", 0, text.index(_BEGIN)) + 1 :] if _BEGIN in text else ""


class SkipLines(io.TextIOBase):
    """Passes a log on to `out` after its first `lines`, which were shown already."""

    def __init__(self, out: io.TextIOBase, lines: int) -> None:
        self._out = out
        self._lines = lines

    def write(self, text: str) -> int:
        left = text
        while self._lines and left:
            _, end, left = left.partition("\n")
            self._lines -= len(end)
        if left:
            self._out.write(left)
        return len(text)

    def flush(self) -> None:
        self._out.flush()
