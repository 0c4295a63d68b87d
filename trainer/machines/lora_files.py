"""The files of a LoRA on their way to another machine: named by their sha256, checked there."""

import asyncio
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kit.manifest import read_manifest, sha256
from trainer.errors import BadRequest, CheckpointError

# All that an engine reads, and all that another machine may have us write.
NAMES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
Hashes = dict[str, str]


async def hashes_of(directory: Path) -> Hashes:
    """What the files of a LoRA must hash to: by its manifest, which was written with them."""
    manifest = read_manifest(directory)
    if manifest is None:
        return {name: await asyncio.to_thread(sha256, directory / name) for name in NAMES}
    return {name: str(manifest["files"][name]["sha256"]) for name in NAMES}


class LoraStore:
    """LoRAs of another machine, each in a directory of its own that never changes.

    Files arrive in pieces. A LoRA appears only when all of its files match their sha256.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Pieces of a connection that broke are worth nothing.
        shutil.rmtree(directory / "arriving", ignore_errors=True)
        (directory / "arriving").mkdir(parents=True)

    def path(self, hashes: Mapping[str, Any]) -> Path:
        """Where a LoRA of these files is, or would be."""
        if sorted(hashes) != sorted(NAMES) or not all(
            isinstance(value, str) and _SHA256.fullmatch(value) for value in hashes.values()
        ):
            raise BadRequest(f"A LoRA is {' and '.join(NAMES)}, each with its sha256")
        told = json.dumps(hashes, sort_keys=True).encode()
        return self._directory / hashlib.sha256(told).hexdigest()

    def receive(self, frame: bytes) -> None:
        """Take one piece: the sha256 of its file in 64 letters, then bytes."""
        digest = frame[:64].decode("ascii", errors="replace")
        if not _SHA256.fullmatch(digest):
            raise BadRequest("A piece of a file does not say of which")
        with (self._directory / "arriving" / digest).open("ab") as file:
            file.write(frame[64:])

    def complete(self, lora: str, hashes: Hashes) -> list[str]:
        """Make the LoRA whole of what has arrived; returns the files that have not."""
        target = self.path(hashes)
        if target.is_dir():
            return []
        arriving = {name: self._directory / "arriving" / hashes[name] for name in NAMES}
        if missing := [name for name, path in arriving.items() if not path.is_file()]:
            return missing
        for name, path in arriving.items():
            if (found := sha256(path)) != hashes[name]:
                path.unlink()
                raise CheckpointError(
                    f"The LoRA `{lora}` arrived damaged: the sha256 of `{name}` is `{found[:12]}…` "
                    f"and not `{hashes[name][:12]}…`",
                    hint="Verify the checkpoint where it was written, with `launcher pull`",
                )
        temporary = Path(tempfile.mkdtemp(dir=self._directory / "arriving"))
        for name, path in arriving.items():
            path.rename(temporary / name)
        temporary.rename(target)
        return []

    def delete(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def keep_only(self, paths: Iterable[Path]) -> None:
        """Delete every other LoRA."""
        keep = {path.name for path in paths} | {"arriving"}
        for path in self._directory.iterdir():
            if path.name not in keep:
                self.delete(path)


def frames(path: Path, digest: str) -> Iterable[bytes]:
    """The pieces that `receive` takes."""
    with path.open("rb") as file:
        yield digest.encode()  # an empty file arrives too
        while chunk := file.read(CHUNK):
            yield digest.encode() + chunk
