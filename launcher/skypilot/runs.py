"""Runs on a cluster of SkyPilot: the jobs in its queue, and their logs."""

import contextlib
import io
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from launcher.errors import RemoteError, RunNotFound
from launcher.provider import RUN, SERVER, Run, RunStatus, resolve_run_id
from launcher.skypilot.door import log_stream, sky, translated
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
"""Part of the first line of a log that SkyPilot shows. The file has other lines before it."""


def start(
    name: str, config: dict[str, Any], envs: Mapping[str, str], secrets: Mapping[str, str]
) -> Run:
    """Add a job to the queue of a cluster that is up."""
    skypilot, run_name = sky(), config["name"]  # SkyPilot empties the mapping that it gets
    with translated(name):
        task = skypilot.Task.from_yaml_config(
            config, env_overrides=list(envs.items()), secrets_overrides=list(secrets.items())
        )
        job_id, _ = skypilot.get(skypilot.exec(task, cluster_name=name))
    return Run(str(job_id), run_name, RunStatus.PENDING)


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
    """See `Provider.logs`. Lines that exist already are read over ssh, in a third of the time.

    SkyPilot follows the log, because it knows when a run is over. It also shows a log that ssh does
    not find, or says why there is none.
    """
    if follow:
        threading.Thread(target=_import_sky, daemon=True).start()
    found, shown = None, ""
    if run_id == SERVER or not (follow and tail):
        # With both, only SkyPilot shows lines: the last ones may have changed by then.
        found, shown = _read(name, run_id, "0" if follow and tail else str(tail or "+1"))
    if follow:
        # Whole lines only: SkyPilot shows an unfinished line from its beginning.
        shown = shown[: shown.rfind("\n") + 1]
    if shown:
        out.write(shown)
        out.flush()
        if not follow:
            return
    if found is None and run_id == SERVER:
        found = resolve_run_id(SERVER, name, runs(name))
    job_id, skypilot = found or run_id, sky()
    with log_stream(out) as stream, translated(name):
        code = skypilot.tail_logs(
            name,
            None if job_id is None else int(job_id),
            follow=follow,
            tail=tail,
            output_stream=SkipLines(stream, shown.count("\n")),
        )
    if code == _NOT_FOUND:
        raise RunNotFound(f"Cluster `{name}` has no run `{job_id or 1}`")


def _import_sky() -> None:
    with contextlib.suppress(Exception):  # the next use of SkyPilot reports what is wrong
        sky()


def _read(name: str, run_id: str | None, lines: str) -> tuple[str | None, str]:
    """Read the id of a run, and the part of its log file that SkyPilot would show.

    SkyPilot keeps the log of a job in `~/sky_logs/ID-NAME`. Returns None and an empty string if the
    file cannot be read.
    """
    remote = Remote(name)
    if not remote.ssh_config.is_file():
        return None, ""
    logs = f"{int(run_id)}-*" if run_id is not None and run_id != SERVER else "[0-9]*-*"
    only = f"| grep -vxE '[0-9]+-{RUN}'" if run_id == SERVER else ""
    try:
        output = remote.run(
            "cd ~/sky_logs || exit\n"
            f"log=$(ls -d {logs} {only} | sort -n | tail -n 1)\n"
            f'cd "$log" && echo "${{log%%-*}}" && tail --lines={lines} run.log'
        )
    except RemoteError:
        return None, ""
    found, _, text = output.partition("\n")
    if lines != "+1":
        return found, text
    if _BEGIN not in text:
        return found, ""
    first_line = text.rfind("\n", 0, text.index(_BEGIN)) + 1
    return found, text[first_line:]


class SkipLines(io.TextIOBase):
    """Writes a log to `out` without its first `count` lines, which were shown already."""

    def __init__(self, out: io.TextIOBase, count: int) -> None:
        self._out = out
        self._count = count

    def write(self, text: str) -> int:
        rest = text
        while self._count and rest:
            _, newline, rest = rest.partition("\n")
            if newline:
                self._count -= 1
        if rest:
            self._out.write(rest)
        return len(text)

    def flush(self) -> None:
        self._out.flush()
