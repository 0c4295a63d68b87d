"""Transfer of LoRA files to another machine, which knows each one by its sha256."""

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kit.manifest import read_manifest, sha256
from trainer.errors import BadRequest
from trainer.machines.ray_cluster import RayCluster

# The only files that an engine reads, and the only ones that are sent.
NAMES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK = 1 << 22
KEPT = 4  # files, of the newest two LoRAs
_SHA256 = re.compile(r"[0-9a-f]{64}")
Hashes = dict[str, str]


async def hashes_of(directory: Path) -> Hashes:
    """Return the sha256 of each file of a LoRA, from its manifest if it has one."""
    manifest = read_manifest(directory)
    if manifest is None:
        return {name: await asyncio.to_thread(sha256, directory / name) for name in NAMES}
    return {name: str(manifest["files"][name]["sha256"]) for name in NAMES}


class Broadcast:
    """Files in Ray's object store. Each is put there once, however many machines fetch it."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._references: dict[str, Any] = {}
        self._putting = asyncio.Lock()

    async def reference(self, path: Path, digest: str) -> Any:
        import numpy  # only with Ray

        async with self._putting:
            if digest not in self._references:
                content = numpy.memmap(path, numpy.uint8, mode="r")  # copied once, into the store
                while len(self._references) >= KEPT:  # machines that still fetch it have their own
                    del self._references[next(iter(self._references))]
                self._references[digest] = await self._cluster.put(content)
            return self._references[digest]


class LoraStore:
    """LoRAs received from the server, each in a directory that never changes.

    A file that arrives is called by the sha256 of what arrived, so a damaged one is never found.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._links: dict[Path, Path] = {}
        # Partial files of a machine that was killed are useless.
        shutil.rmtree(directory / "arriving", ignore_errors=True)
        (directory / "arriving").mkdir(parents=True)

    def path(self, hashes: Mapping[str, Any]) -> Path:
        """Return the directory for a LoRA with these files, whether or not it exists."""
        if sorted(hashes) != sorted(NAMES) or not all(
            isinstance(value, str) and _SHA256.fullmatch(value) for value in hashes.values()
        ):
            raise BadRequest(f"A LoRA needs {' and '.join(NAMES)}, each with its sha256")
        text = json.dumps(hashes, sort_keys=True).encode()
        return self._directory / hashlib.sha256(text).hexdigest()

    def receive(self, content: Any) -> None:
        """Write a file, given as an array of bytes, and hash it at the same time."""
        view, digest = memoryview(content), hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=self._directory / "arriving", delete=False) as file:
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                digest.update(chunk)
                file.write(chunk)
        Path(file.name).rename(self._directory / "arriving" / digest.hexdigest())

    def complete(self, hashes: Hashes) -> list[str]:
        """Assemble a LoRA from the received files, and return the names of missing ones."""
        target = self.path(hashes)
        if target.is_dir():
            return []
        arrived = {name: self._directory / "arriving" / hashes[name] for name in NAMES}
        if missing := [name for name, path in arrived.items() if not path.is_file()]:
            return missing
        temporary = Path(tempfile.mkdtemp(dir=self._directory / "arriving"))
        for name, path in arrived.items():
            path.rename(temporary / name)
        temporary.rename(target)
        return []

    def link(self, path: Path, link: Path) -> None:
        """Make a LoRA available at `link`, unless a machine with the same disk has done it."""
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            self._links[path] = link

    def unlink(self, *paths: Path) -> None:
        """Remove the links to these LoRAs, or all links."""
        for path in paths or list(self._links):
            if link := self._links.pop(path, None):
                link.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it has other links
                    link.parent.rmdir()

    def delete(self, path: Path) -> None:
        self.unlink(path)
        shutil.rmtree(path, ignore_errors=True)

    def keep_only(self, paths: Iterable[Path]) -> None:
        """Delete every other LoRA."""
        keep = {path.name for path in paths} | {"arriving"}
        for path in self._directory.iterdir():
            if path.name not in keep:
                self.delete(path)
