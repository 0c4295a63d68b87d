"""`--local`: the same task YAML in a sandbox directory of this machine.

    ~/.art-cluster/clusters/NAME/
        home/sky_workdir/     a copy of the workdir, where setup and run happen
        runs/1/               one run: pid, log, exit (its exit code), name

A run is a process in its own session, so that it outlives the launcher and `down` ends all of it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from launcher.errors import ClusterNotFound, LauncherError, ProviderError, TaskError
from launcher.provider import WORKDIR, ClusterInfo, Run, RunStatus
from launcher.task import Task


class LocalProvider:
    """Clusters that are directories of this machine."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path.home() / ".art-cluster" / "clusters"

    def launch(self, name: str, task: Task, arguments: Sequence[str]) -> Run | None:
        if arguments:
            raise LauncherError(
                f"`{arguments[0]}` means nothing to a local cluster",
                hint="Leave it out, or leave `--local` out",
            )
        _refuse(task)
        if any(not run.status.over for run in self._runs_or_none(name)):
            raise ProviderError(
                f"The local cluster `{name}` is up already",
                hint=f"End it with `launcher down --local -c {name}`, or use it as it is",
            )
        home = self.root / name / "home"
        home.mkdir(parents=True, exist_ok=True)
        _sync(Path(task.config.get("workdir") or "."), home / WORKDIR)
        for target, source in (task.config.get("file_mounts") or {}).items():
            _mount(Path(source).expanduser(), home, target)
        # Setup is part of the run, as with SkyPilot: `logs` shows it and its failure ends the run.
        scripts = [task.config[part] for part in ("setup", "run") if task.config.get(part)]
        return self._start(name, task.name, scripts, task.envs, task.secrets)

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
        return self._start(self._existing(name).name, "run", [command], envs, secrets)

    def runs(self, name: str) -> list[Run]:
        self._existing(name)
        return self._runs_or_none(name)

    def exit_code(self, name: str, run_id: str) -> int:
        directory = self._run_directory(name, run_id)
        try:
            return int((directory / "exit").read_text())
        except (OSError, ValueError):
            return 137  # ended from outside before it could say so

    def logs(self, name: str, run_id: str, *, follow: bool, tail: int, out: TextIO) -> None:
        directory = self._run_directory(name, run_id)
        with (directory / "log").open(encoding="utf-8", errors="replace") as log:
            lines = log.readlines()
            out.writelines(lines[-tail:] if tail else lines)
            while follow:
                over = _read_run(directory).status.over  # before the read: no line is lost
                out.write(log.read())
                out.flush()
                if over:
                    return
                time.sleep(0.2)

    def fetch(self, name: str, source: str, to: Path, *, checksum: bool) -> None:
        # A copy on one disk costs what reading to compare it would: `checksum` copies all.
        base = self._existing(name) / "home" / source
        for path in sorted(base.glob("*/models/*/checkpoints/[0-9]*/**/*")):
            target = to / path.relative_to(base)
            if path.is_file() and (checksum or not _same(path, target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.partial")
                shutil.copy2(path, partial)
                partial.replace(target)

    @contextlib.contextmanager
    def tunnel(self, name: str, ports: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        self._existing(name)
        for port, local in ports.items():
            if local not in (0, port):
                raise LauncherError(
                    f"A local cluster listens on {port} of this machine, not on {local}",
                    hint="Choose its ports with `ART_PORT` and `ART_OPENAI_PORT` when it comes up",
                )
        yield {port: port for port in ports}

    def down(self, name: str) -> None:
        directory = self.root / name
        if not directory.is_dir():
            return
        for run in self._runs_or_none(name):
            if not run.status.over:
                _end(directory / "runs" / run.id)
        shutil.rmtree(directory)

    def _start(
        self,
        name: str,
        label: str,
        scripts: Sequence[str],
        envs: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> Run:
        home = self.root / name / "home"
        run_id = str(len(self._runs_or_none(name)) + 1)
        directory = self.root / name / "runs" / run_id
        directory.mkdir(parents=True)
        (directory / "about.json").write_text(json.dumps({"name": label}))
        # Files of their own: `set -e` would be off in `( setup ) && ( run )`.
        for number, script in enumerate(scripts):
            (directory / f"{number}.sh").write_text(script)
        chain = " && ".join(f'bash "$0/{number}.sh"' for number in range(len(scripts)))
        # What this machine has cached already need not be fetched again for the sandbox.
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PWD")}
        started = subprocess.run(
            # In the background of a shell that ends: the run is nobody's child and outlives us.
            [
                *("bash", "-c"),
                f'{{ {chain}; echo $? >"$0/exit.new"; mv "$0/exit.new" "$0/exit"; }} '
                '>"$0/log" 2>&1 & echo $!',
                str(directory),
            ],
            cwd=home / WORKDIR,
            env=environment | {"HOME": str(home), "XDG_CACHE_HOME": cache, **envs, **secrets},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            check=True,
        )
        pid = int(started.stdout)
        (directory / "pid").write_text(f"{pid} {_born(pid)}")
        return Run(run_id, label, RunStatus.RUNNING)

    def workdir(self, name: str) -> Path:
        """Where the workdir's copy of a cluster is; the server's state is `.art` in it."""
        return self._existing(name) / "home" / "sky_workdir"

    def _existing(self, name: str) -> Path:
        if not (self.root / name).is_dir():
            raise ClusterNotFound(
                f"There is no local cluster `{name}`",
                hint="List clusters with `launcher ls --local`",
            )
        return self.root / name

    def _runs_or_none(self, name: str) -> list[Run]:
        runs = self.root / name / "runs"
        numbered = sorted(runs.iterdir(), key=lambda path: int(path.name)) if runs.is_dir() else []
        return [_read_run(path) for path in numbered]

    def _run_directory(self, name: str, run_id: str) -> Path:
        directory = self._existing(name) / "runs" / run_id
        if not directory.is_dir():
            raise LauncherError(
                f"Cluster `{name}` has no run `{run_id}`",
                hint=f"List its runs with `launcher ls --local -c {name}`",
            )
        return directory

    def _status(self, name: str) -> str:
        running = any(not run.status.over for run in self._runs_or_none(name))
        return "up" if running else "stopped"


def _read_run(directory: Path) -> Run:
    label = json.loads((directory / "about.json").read_text())["name"]
    if (directory / "exit").is_file():
        code = int((directory / "exit").read_text())
        status = RunStatus.SUCCEEDED if code == 0 else RunStatus.FAILED
    else:
        status = RunStatus.RUNNING if _pid(directory) else RunStatus.CANCELLED
    return Run(directory.name, label, status)


def _pid(directory: Path) -> int | None:
    """The process of a run if it is alive: the number alone may be another process by now."""
    try:
        pid, _, born = (directory / "pid").read_text().partition(" ")
    except OSError:
        return None
    return int(pid) if born and _born(int(pid)) == born else None


def _born(pid: int) -> str:
    """When process `pid` started, or an empty string when there is none."""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _end(directory: Path, patience: float = 15.0) -> None:
    """End the process group of a run: ask first, and after `patience` seconds insist."""
    deadline = time.monotonic() + patience
    while pid := _pid(directory):
        insist = time.monotonic() > deadline
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), signal.SIGKILL if insist else signal.SIGTERM)
        time.sleep(0.3)


def _refuse(task: Task) -> None:
    """Name what a task asks for and this machine cannot give."""
    config = task.config
    wanted = [f"`{key}`" for key in ("volumes", "config") if config.get(key)]
    if (config.get("num_nodes") or 1) != 1:
        wanted.append(f"{config['num_nodes']} nodes")
    if "accelerators" in json.dumps(config.get("resources") or {}):
        wanted.append("GPUs")
    mounts = (config.get("file_mounts") or {}).items()
    wanted += [f"the bucket at `{target}`" for target, source in mounts if isinstance(source, dict)]
    if wanted:
        raise TaskError(
            f"`{task.path}` asks for {wanted[0]}, and a local cluster has none",
            hint="Use `sky/art-cpu.yaml`, unset `ART_BUCKET`, or leave `--local` out",
        )


def _sync(workdir: Path, to: Path) -> None:
    """Copy `workdir` to `to`, less what its .gitignore names."""
    if not workdir.is_dir():
        raise TaskError(f"There is no workdir `{workdir}`", hint="Run from the project's root")
    with tempfile.TemporaryDirectory() as empty:
        # An empty repository over the same tree: every file that is not ignored is untracked in it.
        git = ["git", f"--git-dir={empty}", f"--work-tree={workdir.resolve()}"]
        try:
            subprocess.run(["git", "init", "--quiet", "--bare", empty], check=True)
            listed = subprocess.run(
                [*git, "ls-files", "-z", "--others", "--exclude-standard"],
                cwd=workdir, check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as exc:
            raise ProviderError(
                f"`{workdir}` cannot be listed with git: {exc}", hint="Install git"
            ) from exc
    for name in filter(None, listed.split("\0")):
        _copy(workdir / name, to / name)


def _mount(source: Path, home: Path, target: str) -> None:
    if not source.exists():
        raise TaskError(f"There is no `{source}` to mount at `{target}`")
    path = (home / target.removeprefix("~/")).resolve()
    if not path.is_relative_to(home.resolve()):
        raise TaskError(
            f"`{target}` is outside the sandbox of a local cluster", hint="Mount it below `~/`"
        )
    for file in source.rglob("*") if source.is_dir() else [source]:
        _copy(file, path / file.relative_to(source) if source.is_dir() else path)


def _copy(source: Path, target: Path) -> None:
    if source.is_file() and not _same(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _same(source: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    one, other = source.stat(), target.stat()
    return one.st_size == other.st_size and int(one.st_mtime) == int(other.st_mtime)
