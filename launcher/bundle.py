"""One archive for a bug report: every log of a cluster, its metrics and what its learner drew."""

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
from launcher.settings import MADE_UP_KEY

_FILES = (
    f"{LOGS}/*.log",
    HISTORY_GLOB,
    f"{CHECKPOINT_GLOB}/packed_tensors.png",
    f"{CHECKPOINT_GLOB}/{MANIFEST}",
)


def pack(provider: Provider, cluster: str, to: Path, secrets: Sequence[str]) -> list[str]:
    """Write a `.tar.gz` to `to` and return the names in it.

    No value of `secrets` is in it, nor a key that `up` made up.
    """
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        for run in provider.runs(cluster):
            out = io.StringIO()
            with contextlib.suppress(LauncherError):  # a run that wrote nothing yet
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
                    content = MADE_UP_KEY.sub(b"[secret]", path.read_bytes())
                    for secret in sorted(secrets, key=len, reverse=True):  # one may begin another
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
