"""What this machine remembers of a cluster: what went there, its ports, who launches it."""

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
    """Names of the secrets that tasks of `cluster` were given; no value is kept."""
    path = _secret_names(cluster)
    return path.read_text().split() if path.is_file() else []


def remember_secrets(cluster: str, names: Iterable[str]) -> None:
    path = _secret_names(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = sorted({*secret_names(cluster), *names})
    path.write_text("".join(f"{name}\n" for name in known))


def _secret_names(cluster: str) -> Path:
    return home() / "secrets" / cluster


def note_ports(record: Path, ports: tuple[int, int]) -> None:
    """Note in `record` where a server listens on its cluster."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(ports))


def noted_ports(record: Path) -> tuple[int, int] | None:
    """What was noted there; None where the cluster was not launched from here."""
    try:
        port, openai_port = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    return int(port), int(openai_port)


@contextlib.contextmanager
def launching(cluster: str) -> Iterator[None]:
    """Hold the turn to launch `cluster`: a second launch at once would start a second server."""
    path = home() / "launching" / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProviderError(
                f"Cluster `{cluster}` is being launched by another command already",
                hint=f"Wait for it, and follow it with `launcher logs server -c {cluster}`",
            ) from None
        yield  # the lock ends with the file, and with the process, however that ends
