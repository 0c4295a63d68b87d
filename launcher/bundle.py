"""An archive for bug reports: a cluster's logs, metrics and plots of packed rows."""

import contextlib
import io
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kit.manifest import MANIFEST
from kit.state_dir import CHECKPOINT_GLOB, HISTORY_GLOB, LOGS
from launcher.errors import LauncherError
from launcher.provider import CLUSTER_STATE_DIR, Provider
from launcher.settings import GENERATED_KEY

_FILES = (
    f"{LOGS}/*.log",
    HISTORY_GLOB,
    f"{CHECKPOINT_GLOB}/packed_tensors.png",
    f"{CHECKPOINT_GLOB}/{MANIFEST}",
)


def pack(provider: Provider, cluster: str, to: Path, secrets: Sequence[str]) -> list[str]:
    """Write a `.tar.gz` to `to` and return the names of its files.

    Replaces the values of `secrets`, and any key that `up` generated, with `[secret]`.
    """
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        for run in provider.runs(cluster):
            out = io.StringIO()
            with contextlib.suppress(LauncherError):  # the run has no output yet
                provider.logs(cluster, run.id, follow=False, tail=0, out=out)
            (base / f"run-{run.id}-{run.name}-{run.status}.log").write_text(out.getvalue())
        provider.fetch(
            cluster,
            CLUSTER_STATE_DIR,
            base / "art",
            _FILES,
            checksum=False,
            progress=lambda *_: None,
        )
        names = []
        try:
            with tarfile.open(to, "w:gz") as archive:
                for path in sorted(path for path in base.rglob("*") if path.is_file()):
                    content = GENERATED_KEY.sub(b"[secret]", path.read_bytes())
                    # Longest first, because one secret may contain another.
                    for secret in sorted(secrets, key=len, reverse=True):
                        content = content.replace(secret.encode(), b"[secret]")
                    about = archive.gettarinfo(path, f"{cluster}/{path.relative_to(base)}")
                    about.size = len(content)
                    archive.addfile(about, io.BytesIO(content))
                    names.append(about.name)
        except OSError as exc:
            raise LauncherError(
                f"`{to}` cannot be written: {exc.strerror}", hint="Choose another file"
            ) from exc
    return names
