"""`manifest.json`: the sha256 of every file in a checkpoint, and its step, parent and config.

The server writes it, and the launcher checks it after a pull.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kit.files import identity

MANIFEST = "manifest.json"

_cached_hashes: dict[tuple[int, ...], str] = {}


def sha256(path: Path) -> str:
    """The hash of a file. A file that has not changed since the last call is not read again."""
    key, settled = identity(path)
    if key in _cached_hashes:
        return _cached_hashes[key]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if settled:
        _cached_hashes[key] = digest
    return digest


def trust(directory: Path) -> None:
    """Take the hashes in a manifest that was just written as those of its files.

    They are not read again until they change.
    """
    for name, entry in (read_manifest(directory) or {"files": {}})["files"].items():
        with contextlib.suppress(OSError):
            key, settled = identity(directory / name)
            if settled:
                _cached_hashes.setdefault(key, entry["sha256"])


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
        files = manifest["files"].values()
        whole = all({"sha256", "bytes"} <= entry.keys() for entry in files)
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    return manifest if whole else None


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
