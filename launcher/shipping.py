"""The kit as it is installed here, packed so that a cluster runs the same code.

    ~/.art-cluster/kits/HASH/      on this machine and on the cluster
        art_cluster-0.1.0-py3-none-any.whl
        requirements/  scripts/    pins, and what installs the wheel with them

The hash is that of the content: a kit that did not change is neither packed nor installed again.
"""

import base64
import csv
import dataclasses
import hashlib
import importlib.metadata
import shutil
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from kit.package_data import DATA, NAME, clone, is_clone
from launcher.errors import LauncherError
from launcher.state import home
from launcher.task import Task

_SENT = (f"{DATA}/requirements/", f"{DATA}/scripts/")
_KEPT = 5  # packed kits on this machine
# What an installer adds to a wheel's own files.
_INSTALLERS = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_WHEEL = "Wheel-Version: 1.0\nGenerator: art-cluster\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# The server starts in the user's project, where a file may be called `trainer.py`.
_ALONE = "export PYTHONSAFEPATH=1\nunset PYTHONPATH\n"


def with_kit(task: Task) -> Task:
    """The same task with the kit beside the workdir, if it installs the kit from `$ART_KIT`.

    A task whose workdir is a clone of the kit installs it from there.
    """
    config, workdir = task.config, task.config.get("workdir")
    scripts = {part: config[part] for part in ("setup", "run") if config.get(part)}
    if not any("ART_KIT" in script for script in scripts.values()):
        return task
    if not isinstance(workdir, dict) and is_clone(Path(workdir or ".")):
        return task
    packed = pack()
    place = f".art-cluster/kits/{packed.name}"
    exports = f"export ART_KIT=~/{place} ART_SERVER=~/.art-cluster/server\n"
    alone = {"setup": exports, "run": exports + _ALONE}
    return dataclasses.replace(
        task,
        config={
            **config,
            **{part: alone[part] + script for part, script in scripts.items()},
            "file_mounts": {**(config.get("file_mounts") or {}), f"~/{place}": str(packed)},
        },
    )


def pack() -> Path:
    """Pack the kit that is running, and return its directory on this machine."""
    files = _contents()
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    kits = home() / "kits"
    packed = kits / digest.hexdigest()[:16]
    if not packed.is_dir():
        kits.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=kits, prefix=".partial-"))
        _write(partial, files)
        try:
            partial.rename(packed)
        except OSError:  # another command was faster
            shutil.rmtree(partial)
    packed.touch()
    for old in sorted(kits.glob("[!.]*"), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return packed


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    info = next(name.split("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
    wheel = directory / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    record = "".join(
        f"{name},sha256={_base64(content)},{len(content)}\n" for name, content in files.items()
    )
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {
            **files,
            f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode(),
        }.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    for name, content in files.items():
        if name.startswith(_SENT):
            path = directory / name.removeprefix(f"{DATA}/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755 if "/scripts/" in name else 0o644)
    directory.chmod(0o755)


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@cache
def _contents() -> dict[str, bytes]:
    """The files of the kit's wheel, by their name in it."""
    root = clone()
    return _of_clone(root) if root else _of_installation()


def _of_installation() -> dict[str, bytes]:
    """Everything that was installed from a wheel, from an index or from git."""
    try:
        kit = importlib.metadata.distribution(NAME)
        # Not `kit.files`, which leaves out what is missing.
        record = csv.reader((kit.read_text("RECORD") or "").splitlines())
        wanted = [
            file
            for file in (PurePosixPath(row[0]) for row in record)
            if ".." not in file.parts  # the programs in `bin`, which an installer makes
            and "__pycache__" not in file.parts
            and not (file.parts[0].endswith(".dist-info") and file.name in _INSTALLERS)
        ]
        return {str(file): Path(str(kit.locate_file(str(file)))).read_bytes() for file in wanted}
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        raise LauncherError(
            f"The kit is not installed completely, so it cannot be sent to a cluster: {error}",
            hint=f"Install `{NAME}` again",
        ) from error


def _of_clone(root: Path) -> dict[str, bytes]:
    """The clone as it is now, with its changes: the files that the build backend would pack."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    target = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {**{name: name for name in target["packages"]}, **target["force-include"]}
    project = settings["project"]
    info = f"{NAME.replace('-', '_')}-{project['version']}.dist-info"
    files = {name: path.read_bytes() for name, path in _found(root, places)}
    return files | {
        f"{info}/METADATA": _metadata(project).encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
        f"{info}/entry_points.txt": _entry_points(project).encode(),
    }


def _found(root: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for source, place in places.items():
        path = root / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                inner = file.relative_to(path).as_posix()
                yield place if file == path else f"{place}/{inner}", file


def _metadata(project: Mapping[str, Any]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {NAME}", f"Version: {project['version']}"]
    lines += [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {needed}" for needed in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for needed in needs:
            requirement, _, marker = (part.strip() for part in needed.partition(";"))
            only = f"({marker}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            lines.append(f"Requires-Dist: {requirement} ; {only}")
    return "\n".join([*lines, ""])


def _entry_points(project: Mapping[str, Any]) -> str:
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in groups.items()
    )
