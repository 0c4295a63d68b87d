"""`--local`: run the same task YAML in a sandbox directory on this machine.

    ~/.art-cluster/clusters/NAME/
        home/sky_workdir/     a copy of the workdir, where setup and run happen
        runs/1/               one run: its name, process id, log and exit code

A run has its own session, so that it outlives the launcher and `down` ends all its processes.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TextIO

from launcher.errors import ClusterNotFound, LauncherError, ProviderError, RunNotFound
from launcher.files import (
    copy_if_new,
    file_sizes,
    record_sent,
    removed_since,
    same_size_and_time,
    select,
)
from launcher.local.runs import follow_file, make_run, read_run, start_time, stop_run
from launcher.local.tasks import check_ports, check_task, mount
from launcher.provider import (
    RUN,
    SETUP_FAILED,
    WORKDIR,
    Check,
    ClusterInfo,
    Cost,
    Price,
    Progress,
    Run,
    RunStatus,
    Sent,
    resolve_run_id,
)
from launcher.task import Task

# Names this environment to `scripts/install`, which links its packages instead of installing them.
SEED_ENVIRONMENT = "ART_SEED_ENVIRONMENT"


class LocalProvider:
    """Clusters that are directories on this machine."""

    option: ClassVar[str] = " --local"

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path.home() / ".art-cluster" / "clusters"

    def launch(
        self,
        name: str,
        task: Task,
        arguments: Sequence[str],
        *,
        reachable: Callable[[], None] = lambda: None,
    ) -> Run | None:
        if arguments:
            raise LauncherError(
                f"A local cluster does not support `{arguments[0]}`",
                hint=f"Remove `{arguments[0]}`, or remove `--local`",
            )
        check_task(task)
        if any(not run.status.over for run in self._runs_or_none(name)):
            raise ProviderError(
                f"The local cluster `{name}` is already up",
                hint=f"Use it as it is, or end it with `launcher down --local -c {name}`",
            )
        check_ports(task)
        home = self.root / name / "home"
        home.mkdir(parents=True, exist_ok=True)
        workdir = Path(task.config.get("workdir") or ".")
        self._sync(name, workdir, select(workdir))
        for target, source in (task.config.get("file_mounts") or {}).items():
            mount(Path(source).expanduser(), home, target)
        # As with SkyPilot, setup is part of the run: `logs` shows it, and if it fails, so does
        # the run.
        scripts = [task.config[part] for part in ("setup", "run") if task.config.get(part)]
        started = self._start(name, task.name, scripts, task.envs, task.secrets)
        reachable()
        return started

    def like(self, name: str) -> list[str]:
        return []  # there is only this machine

    def resume(self, name: str) -> Run | None:
        return None  # a launch never outlives its launcher

    def clusters(self) -> list[ClusterInfo]:
        if not self.root.is_dir():
            return []
        return [
            ClusterInfo(path.name, self._status(path.name), f"local {path}")
            for path in sorted(self.root.iterdir())
        ]

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        return self._start(self._existing(name).name, RUN, [command], envs, secrets)

    def runs(self, name: str) -> list[Run]:
        self._existing(name)
        return self._runs_or_none(name)

    def exit_code(self, name: str, run_id: str) -> int:
        directory = self._run_directory(name, run_id)
        try:
            return int((directory / "exit").read_text())
        except (OSError, ValueError):
            return 137  # killed before it could write its exit code

    def sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        self._existing(name)
        return self._sync(name, workdir, files)

    def cancel(self, name: str, run_id: str) -> None:
        stop_run(self._run_directory(name, run_id))

    def logs(self, name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
        directory = self._run_directory(name, resolve_run_id(run_id, name, self.runs(name)))
        follow_file(
            directory / "log",
            follow=lambda: follow and not read_run(directory).status.over,
            tail=tail,
            out=out,
        )

    def read(self, name: str, path: str, *, follow: bool, tail: int, out: TextIO) -> None:
        file = self._existing(name) / "home" / path
        if not file.is_file():
            raise LauncherError(f"Cluster `{name}` has no `~/{path}` yet", hint="Try again later")
        follow_file(file, follow=lambda: follow and self._status(name) == "up", tail=tail, out=out)

    @contextlib.contextmanager
    def writer(self, name: str, path: str) -> Iterator[Callable[[str], None]]:
        file = self._existing(name) / "home" / path

        def write(text: str) -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

        yield write

    def fetch(
        self,
        name: str,
        source: str,
        to: Path,
        patterns: Sequence[str],
        *,
        checksum: bool,
        progress: Progress,
    ) -> None:
        # On one disk a copy is as fast as a comparison, so `checksum` copies every file.
        base = self._existing(name) / "home" / source
        globs = [f"{pattern}/*" if pattern.endswith("**") else pattern for pattern in patterns]
        found = {path for glob in globs for path in base.glob(glob) if path.is_file()}
        targets = {path: to / path.relative_to(base) for path in sorted(found)}
        new = [it for it in targets if checksum or not same_size_and_time(it, targets[it])]
        total, done = sum(path.stat().st_size for path in new), 0
        for path in new:
            targets[path].unlink(missing_ok=True)
            copy_if_new(path, targets[path])
            done += path.stat().st_size
            progress(done, done / max(total, 1))

    @contextlib.contextmanager
    def tunnel(self, name: str, ports: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        self._existing(name)
        for port, local in ports.items():
            if local not in (0, port):
                raise LauncherError(
                    f"A local cluster listens on port {port} of this machine, not on {local}",
                    hint="Set `ART_PORT` and `ART_OPENAI_PORT` before `launcher up`",
                )
        yield {port: port for port in ports}

    def down(self, name: str) -> None:
        directory = self.root / name
        if not directory.is_dir():
            return
        for run in self._runs_or_none(name):
            if not run.status.over:
                stop_run(directory / "runs" / run.id)
        shutil.rmtree(directory)

    def cost(self, name: str) -> Cost:
        first = self._existing(name) / "runs" / "1" / "about.json"
        began = first.stat().st_mtime if first.is_file() else time.time()
        return Cost(0.0, 0.0, (time.time() - began) / 3600, None)

    def ports_record(self, name: str) -> Path:
        return self.root / name / "ports.json"

    def prices(self) -> Mapping[tuple[str, int], Price]:
        raise LauncherError(
            "A local cluster costs nothing", hint="Leave out `--local` for the prices of clouds"
        )

    def checks(self) -> list[Check]:
        return []  # needs nothing but this machine

    def _sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        """Copy `files`, and delete those that were copied before and are not among them."""
        to = self.root / name / "home" / WORKDIR
        record = self.root / name / "sent.json"
        removed = [path for path in removed_since(record, workdir, files) if (to / path).is_file()]
        for path in removed:
            (to / path).unlink()
        sent = [path for path in files if copy_if_new(workdir / path, to / path)]
        to.mkdir(exist_ok=True)
        record_sent(record, workdir, files)
        return Sent(tuple(sent), tuple(removed), sum(file_sizes(workdir, sent).values()))

    def _start(
        self,
        name: str,
        label: str,
        scripts: Sequence[str],
        envs: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> Run:
        home = self.root / name / "home"
        directory = make_run(self.root / name / "runs", label)
        # One file per script, because bash ignores `set -e` in `( setup ) && ( run )`.
        for number, script in enumerate(scripts):
            (directory / f"{number}.sh").write_text(script)
        *before, last = (f'bash "$0/{number}.sh"' for number in range(len(scripts)))
        on_failure = f'(code=$?; echo "{SETUP_FAILED} with code $code"; exit $code)'
        chain = " && ".join([*(f"{{ {script} || {on_failure}; }}" for script in before), last])
        # The sandbox shares the cache of this machine, so that nothing is downloaded twice.
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PWD")}
        started = subprocess.run(
            # In the background of a shell that exits, so that the run outlives the launcher.
            [
                *("bash", "-c"),
                f'{{ {chain}; echo $? >"$0/exit.new"; mv "$0/exit.new" "$0/exit"; }} '
                '>"$0/log" 2>&1 & echo $! | tee "$0/pid"',
                str(directory),
            ],
            cwd=home / WORKDIR,
            env=environment
            | {"HOME": str(home), "XDG_CACHE_HOME": cache, SEED_ENVIRONMENT: sys.prefix}
            | {**envs, **secrets},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            check=True,
        )
        pid = int(started.stdout)
        (directory / "pid").write_text(f"{pid} {start_time(pid)}")
        return Run(directory.name, label, RunStatus.RUNNING)

    def workdir(self, name: str) -> Path:
        """The cluster's copy of the workdir; `.art` in it is the server's state directory."""
        return self._existing(name) / "home" / WORKDIR

    def _existing(self, name: str) -> Path:
        if not (self.root / name).is_dir():
            raise ClusterNotFound(
                f"There is no local cluster `{name}`",
                hint="List clusters with `launcher ls --local`",
            )
        return self.root / name

    def _runs_or_none(self, name: str) -> list[Run]:
        runs = self.root / name / "runs"
        # A run that another command is starting has no `about.json` yet.
        found = [path.parent for path in runs.glob("*/about.json")]
        return [read_run(path) for path in sorted(found, key=lambda path: int(path.name))]

    def _run_directory(self, name: str, run_id: str) -> Path:
        directory = self._existing(name) / "runs" / run_id
        if not directory.is_dir():
            raise RunNotFound(
                f"Cluster `{name}` has no run `{run_id}`",
                hint=f"List its runs with `launcher ls --local -c {name}`",
            )
        return directory

    def _status(self, name: str) -> str:
        running = any(not run.status.over for run in self._runs_or_none(name))
        return "up" if running else "stopped"
