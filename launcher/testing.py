"""`FakeProvider`: clusters in memory, for tests of what is built on a provider."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import ClassVar, TextIO

from kit.manifest import write_manifest
from launcher.errors import ClusterNotFound, LauncherError, RunNotFound
from launcher.files import file_sizes, record_sent, removed_since, select
from launcher.provider import (
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


@dataclass
class FakeProvider:
    """Keeps clusters in a dictionary and every call on record. A run ends at once with `code`."""

    option: ClassVar[str] = ""
    code: int = 0
    checkpoints: dict[str, bytes] = field(default_factory=dict)
    """Content of each LoRA, by its checkpoint's path, such as `demo/models/m/checkpoints/0001`."""
    damaged: set[str] = field(default_factory=set)
    """Paths of the checkpoints whose LoRA does not match its manifest."""
    port: int = 0
    """Local port of every tunnel; 0 for the one that was requested."""
    launched: list[tuple[str, Task, list[str]]] = field(default_factory=list)
    started: list[dict[str, object]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Text files on the clusters, by path."""
    breaks: list[Exception] = field(default_factory=list)
    """Errors that the next calls of `fetch` raise, the last one first."""
    status: str = "up"
    """Status of every cluster."""
    spent: Cost = field(default_factory=lambda: Cost(1.5, 3.0, 0.5, None))
    price_list: dict[tuple[str, int], Price] = field(default_factory=dict)
    """Prices by name and number of cards; without any there is no catalog."""
    _sizes: dict[str, int] = field(default_factory=dict)
    _runs: dict[str, list[Run]] = field(default_factory=dict)

    def launch(
        self,
        name: str,
        task: Task,
        arguments: Sequence[str],
        *,
        reachable: Callable[[], None] = lambda: None,
    ) -> Run | None:
        self.launched.append((name, task, list(arguments)))
        if "--dryrun" in arguments:
            return None
        workdir = Path(task.config.get("workdir") or ".")
        record_sent(_record(), workdir, select(workdir))
        self._runs.setdefault(name, []).append(Run("1", task.name, RunStatus.RUNNING))
        reachable()
        return self._runs[name][-1]

    def like(self, name: str) -> list[str]:
        self.runs(name)
        return ["--infra", "nowhere", "--gpus", "H100:2"]

    def resume(self, name: str) -> Run | None:
        return None

    def clusters(self) -> list[ClusterInfo]:
        return [ClusterInfo(name, self.status, "nowhere") for name in self._runs]

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        runs = self.runs(name)
        self.started.append({"command": command, "envs": envs, "secrets": secrets})
        status = RunStatus.FAILED if self.code else RunStatus.SUCCEEDED
        runs.append(Run(str(len(runs) + 1), "run", status))
        return runs[-1]

    def sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        self.runs(name)
        removed, sizes = removed_since(_record(), workdir, files), file_sizes(workdir, files)
        record_sent(_record(), workdir, files)
        changed = [path for path in files if self._sizes.get(path) != sizes[path]]
        self._sizes = sizes
        return Sent(tuple(changed), tuple(removed), sum(sizes[path] for path in changed))

    def cancel(self, name: str, run_id: str) -> None:
        runs = self.runs(name)
        runs[:] = [
            Run(run.id, run.name, RunStatus.CANCELLED) if run.id == run_id else run for run in runs
        ]

    def runs(self, name: str) -> list[Run]:
        if name not in self._runs:
            raise ClusterNotFound(f"There is no cluster `{name}`")
        return self._runs[name]

    def exit_code(self, name: str, run_id: str) -> int:
        self.runs(name)
        return self.code

    def logs(self, name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
        run_id = resolve_run_id(run_id, name, self.runs(name))
        if run_id not in [run.id for run in self.runs(name)]:
            raise RunNotFound(f"Cluster `{name}` has no run `{run_id}`")
        out.write(f"output of {run_id}\n")

    def read(self, name: str, path: str, *, follow: bool, tail: int, out: TextIO) -> None:
        self.runs(name)
        out.write(self.files.get(path, f"content of {path}\n"))

    @contextlib.contextmanager
    def writer(self, name: str, path: str) -> Iterator[Callable[[str], None]]:
        self.runs(name)
        yield lambda text: self.files.update({path: text})

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
        self.runs(name)
        if self.breaks:
            raise self.breaks.pop()
        with tempfile.TemporaryDirectory() as directory:
            there = Path(directory)
            self._make(there, source)
            for path in (path for path in there.rglob("*") if path.is_file()):
                name = str(path.relative_to(there))
                wanted = any(fnmatch(name, pattern) for pattern in patterns)
                if wanted and (checksum or not (to / name).exists()):
                    (to / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, to / name)
        progress(1, 1.0)

    def _make(self, there: Path, source: str) -> None:
        """Write the files below `source` of a cluster into `there`."""
        for place, content in self.checkpoints.items():
            (there / place).mkdir(parents=True)
            (there / place / "adapter_model.safetensors").write_bytes(content)
            write_manifest(there / place, {"step": int(Path(place).name)})
            if place in self.damaged:
                (there / place / "adapter_model.safetensors").write_bytes(b"cut")
        for path, text in self.files.items():
            if Path(path).is_relative_to(source):
                (there / Path(path).relative_to(source)).write_text(text)

    @contextlib.contextmanager
    def tunnel(self, name: str, ports: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        self.runs(name)
        yield {port: self.port or wanted or port for port, wanted in ports.items()}

    def cost(self, name: str) -> Cost:
        self.runs(name)
        return self.spent

    def ports_record(self, name: str) -> Path:
        return Path.home() / f"fake-{name}-ports.json"

    def prices(self) -> Mapping[tuple[str, int], Price]:
        if not self.price_list:
            raise LauncherError("there is no catalog")
        return self.price_list

    def checks(self) -> list[Check]:
        return [Check("fake", True, "it works")]

    def down(self, name: str) -> None:
        self.ended.append(name)
        self._runs.pop(name, None)
        self.ports_record(name).unlink(missing_ok=True)


def _record() -> Path:
    return Path.home() / "fake-sent.json"
