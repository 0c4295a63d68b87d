"""`manifest.json`: the sha256 of every file in a checkpoint, and its step, parent and config.

The server writes it, and the launcher checks it after a pull.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"

_cached_hashes: dict[tuple[int, ...], str] = {}
_SETTLED_NS = 100_000_000
"""A file written more recently than this could change again within one clock tick."""


def sha256(path: Path) -> str:
    """The hash of a file. A file that has not changed since the last call is not read again."""
    about = path.stat()
    identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    if identity in _cached_hashes:
        return _cached_hashes[identity]
    now = time.time_ns()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if now - max(about.st_mtime_ns, about.st_ctime_ns) > _SETTLED_NS:
        _cached_hashes[identity] = digest
    return digest


def write_manifest(
    directory: Path, about: dict[str, Any], hashes: Mapping[str, str] | None = None
) -> None:
    """Describe every file under `directory`; `about` holds the step, parent, config and so on.

    `hashes` holds those of files that were hashed while they were written.
    """
    known = hashes or {}
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    paths = {str(path.relative_to(directory)): path for path in found if path.name != MANIFEST}
    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
        digests = list(pool.map(lambda name: known.get(name) or sha256(paths[name]), paths))
    files = {
        name: {"sha256": digest, "bytes": path.stat().st_size}
        for (name, path), digest in zip(paths.items(), digests, strict=True)
    }
    text = json.dumps({**about, "files": files}, indent=2, sort_keys=True)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of `directory`, or None if it is missing or not a manifest."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "files" in manifest else None


def damage(directory: Path) -> list[str]:
    """One sentence for each file of `directory` that does not match its manifest."""
    manifest = read_manifest(directory)
    if manifest is None:
        return [f"`{directory}` has no readable `{MANIFEST}`"]
    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
        paths = [directory / name for name in manifest["files"]]
        return [fault for fault in pool.map(_fault, paths, manifest["files"].values()) if fault]


def _fault(path: Path, entry: dict[str, Any]) -> str:
    if not path.is_file():
        return f"`{path}` is missing"
    if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
        return f"`{path}` does not match its sha256"
    return ""
