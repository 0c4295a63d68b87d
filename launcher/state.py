"""Records of each cluster on this machine: sent files, secret names, ports and the launch lock."""

import contextlib
import fcntl
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.errors import ProviderError


def home() -> Path:
    return Path.home() / ".art-cluster"


def sent_record(cluster: str) -> Path:
    return home() / "sent" / f"{cluster}.json"


def secret_names(cluster: str) -> list[str]:
    """Names of the secrets that tasks of `cluster` received. Their values are not stored."""
    path = _secrets_record(cluster)
    return path.read_text().split() if path.is_file() else []


def add_secret_names(cluster: str, names: Iterable[str]) -> None:
    path = _secrets_record(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    all_names = sorted({*secret_names(cluster), *names})
    path.write_text("".join(f"{name}\n" for name in all_names))


def _secrets_record(cluster: str) -> Path:
    return home() / "secrets" / cluster


def write_ports(record: Path, ports: tuple[int, int]) -> None:
    """Record the ports of a server on its cluster."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(ports))


def read_ports(record: Path) -> tuple[int, int] | None:
    """The recorded ports, or None if the cluster was not launched from this machine."""
    try:
        port, openai_port = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    return int(port), int(openai_port)


@contextlib.contextmanager
def launch_lock(cluster: str) -> Iterator[None]:
    """Allow one launch of `cluster` at a time: two at once would start two servers."""
    path = home() / "launching" / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProviderError(
                f"Another command is already launching cluster `{cluster}`",
                hint="Wait until it is done",
            ) from None
        yield  # closing the file releases the lock, even if the process is killed
