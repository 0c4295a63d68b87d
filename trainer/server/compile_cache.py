"""Keeps compiled code of vLLM and the learner for the next start.

It is kept on this machine and, if the state directory is mounted from a bucket, also there as one
archive, because a bucket is slow with many small files. The next machine of the same kind starts
from it. So anybody who can write to the bucket can run code on the machine, as with checkpoints of
a model that bring code.
"""

import hashlib
import logging
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kit.state_dir import COMPILED
from trainer.base_model.resolve import cache_directory
from trainer.config import ServerConfig

logger = logging.getLogger(__name__)
# What tells these programs where to keep it, and the folder of each.
VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


class CompileCache:
    """The compiled code of one base model on one kind of machine."""

    def __init__(self, config: ServerConfig, base_model: str) -> None:
        name = hashlib.sha256("\n".join([base_model, *_machine()]).encode()).hexdigest()[:16]
        self._directory = cache_directory() / "compiled" / name
        self._archive = config.state_path / COMPILED / f"{name}.tar.gz" if config.bucket else None
        self._saved = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables for vLLM and the learner; those that the user has set are left alone."""
        return {
            variable: str(self._directory / folder)
            for variable, folder in VARIABLES.items()
            if variable not in os.environ
        }

    def restore(self) -> None:
        """Take over what another machine has compiled, unless this one has compiled before."""
        if self._archive is None or self._directory.exists() or not self._archive.exists():
            return
        parent = self._directory.parent
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=parent))
        try:
            # Compressed, since only then a cut or damaged archive is noticed.
            with tarfile.open(self._archive, "r:gz") as archive:
                archive.extractall(temporary, filter="data")
            temporary.rename(self._directory)
            self._saved = self._size()
            logger.info("compiled code of an earlier machine is used again")
        except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
            logger.warning("`%s` is not used: %s", self._archive, error)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def save(self) -> None:
        """Put what was compiled into the bucket, if there is anything new."""
        if self._archive is None:
            return
        temporary = self._archive.with_name(f"{self._archive.name}.{os.getpid()}")
        try:
            if (size := self._size()) == self._saved:
                return
            self._archive.parent.mkdir(parents=True, exist_ok=True)
            for left in self._archive.parent.glob(f"{self._archive.name}.*"):  # by a killed server
                left.unlink()
            with tarfile.open(temporary, "w:gz", compresslevel=1) as archive:
                archive.add(self._directory, arcname=".")
            temporary.replace(self._archive)
            self._saved = size
            logger.info("kept %.0f MB of compiled code for the next machine", size / 1e6)
        except OSError as error:  # a full disk, or a file that vLLM has removed meanwhile
            logger.warning("the compiled code is not kept: %s", error)
            temporary.unlink(missing_ok=True)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())


def _machine() -> list[str]:
    """What compiled code depends on, besides the model. Both programs check the rest themselves."""
    cards = sorted(
        line
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    )
    return [*cards, sys.version, *map(_version, ("torch", "vllm", "art-cluster"))]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # vLLM may be in another environment
        return ""
