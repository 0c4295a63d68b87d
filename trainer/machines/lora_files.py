"""Transfer of LoRA files to another machine, which checks each one against its sha256."""

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

# The only files that an engine reads, and the only ones that a head may write here.
NAMES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
Hashes = dict[str, str]


async def hashes_of(directory: Path) -> Hashes:
    """Return the sha256 of each file of a LoRA, from its manifest if it has one."""
    manifest = read_manifest(directory)
    if manifest is None:
        return {name: await asyncio.to_thread(sha256, directory / name) for name in NAMES}
    return {name: str(manifest["files"][name]["sha256"]) for name in NAMES}


class LoraStore:
    """LoRAs received from the head, each in a directory that never changes.

    Files arrive in pieces. A LoRA's directory appears only when all of its files match their
    sha256.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Partial files of a broken connection are useless.
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

    def receive(self, frame: bytes) -> None:
        """Append one piece to its file: 64 characters with the file's sha256, then bytes."""
        digest = frame[:64].decode("ascii", errors="replace")
        if not _SHA256.fullmatch(digest):
            raise BadRequest("A piece of a file does not start with the file's sha256")
        with (self._directory / "arriving" / digest).open("ab") as file:
            file.write(frame[64:])

    def complete(self, lora: str, hashes: Hashes) -> list[str]:
        """Assemble a LoRA from the received files, and return the names of missing ones."""
        target = self.path(hashes)
        if target.is_dir():
            return []
        arriving = {name: self._directory / "arriving" / hashes[name] for name in NAMES}
        if missing := [name for name, path in arriving.items() if not path.is_file()]:
            return missing
        for name, path in arriving.items():
            if (actual := sha256(path)) != hashes[name]:
                path.unlink()
                raise CheckpointError(
                    f"The LoRA `{lora}` arrived damaged: the sha256 of `{name}` is "
                    f"`{actual[:12]}…`, not `{hashes[name][:12]}…`",
                    hint="Verify the original checkpoint with `launcher pull`",
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
    """Yield a file in the pieces that `receive` expects."""
    with path.open("rb") as file:
        yield digest.encode()  # creates the file even if it is empty
        while chunk := file.read(CHUNK):
            yield digest.encode() + chunk
