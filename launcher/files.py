"""Select the files of a workdir that go to a cluster, record them, and copy files locally."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kit.state_dir import STATE_DIR
from launcher.errors import ProviderError, TaskError
from launcher.state import home

SKYIGNORE = ".skyignore"
# Secrets, and directories that the cluster creates itself: skipped whatever the ignore files say.
_NEVER_SENT = ("/.env", "/.venv/", f"/{STATE_DIR}/", "/.git/")


def select(workdir: Path) -> list[str]:
    """The files of `workdir` that go to a cluster, relative to `workdir`.

    As with `sky launch`, a `.skyignore` replaces every `.gitignore`.
    """
    if not workdir.is_dir():
        raise TaskError(f"There is no workdir `{workdir}`", hint="Run from the project's root")
    return _not_ignored(workdir, *(f"--exclude={pattern}" for pattern in _NEVER_SENT))


def refuse_unignored_env_file(configured: object) -> None:
    """Raise if SkyPilot would send the `.env` of a workdir: it only obeys the ignore files."""
    if not isinstance(configured, str):
        return  # no workdir, or one that SkyPilot clones from git
    workdir = Path(configured)
    if (workdir / ".env").is_file() and _not_ignored(workdir, "--", ".env"):
        ignore_file = SKYIGNORE if (workdir / SKYIGNORE).is_file() else ".gitignore"
        raise TaskError(
            f"`{workdir / '.env'}` would go to the cluster, with every secret in it",
            hint=f"Add a line `.env` to `{workdir / ignore_file}`",
        )


def sendable(name: str, workdir: Path) -> str:
    """The directory from which SkyPilot sends the files of `select`, for the cluster `name`.

    SkyPilot obeys a `.gitignore` only in a git repository. Anywhere else it would send everything,
    `.env` and `.venv` with it, so there it gets a directory of links to the selected files.
    """
    if (workdir / SKYIGNORE).is_file() or _git_obeys(workdir):
        return str(workdir)
    selected = home() / "workdirs" / name
    shutil.rmtree(selected, ignore_errors=True)
    selected.mkdir(parents=True)
    for file in select(workdir):
        link = selected / file
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(workdir / file, link, follow_symlinks=False)
        except OSError:  # on another disk
            shutil.copy2(workdir / file, link, follow_symlinks=False)
    return str(selected)


def _git_obeys(workdir: Path) -> bool:
    """Whether `workdir` is in a git repository that does not ignore all of it."""
    git = ["git", "-c", "safe.directory=*", "-C", str(workdir)]
    inside = subprocess.run([*git, "rev-parse", "--is-inside-work-tree"], capture_output=True)
    ignored = subprocess.run([*git, "check-ignore", "--quiet", "."], capture_output=True)
    return inside.returncode == 0 and ignored.returncode == 1


def _not_ignored(workdir: Path, *arguments: str) -> list[str]:
    skyignore = workdir.resolve() / SKYIGNORE
    rules = f"--exclude-from={skyignore}" if skyignore.is_file() else "--exclude-standard"
    with tempfile.TemporaryDirectory() as empty:
        # In an empty repository, every file that is not ignored counts as untracked.
        try:
            subprocess.run(["git", "init", "--quiet", "--bare", empty], check=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            raise ProviderError("git does not run here", hint="Install git") from exc
        return sorted(_list(workdir, empty, [rules, *arguments]))


def _list(tree: Path, git_dir: str, rules: Sequence[str]) -> Iterator[str]:
    command = ["git", f"--git-dir={git_dir}", f"--work-tree={tree.resolve()}", "ls-files", "-z"]
    done = subprocess.run([*command, "--others", *rules], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise ProviderError(
            f"`{tree}` cannot be listed: {done.stderr.strip()}", hint="Check its permissions"
        )
    for name in filter(None, done.stdout.split("\0")):
        if name.endswith("/"):  # a nested repository, which git does not enter
            yield from (name + inner for inner in _list(tree / name, git_dir, rules))
        else:
            yield name


def file_sizes(workdir: Path, files: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each of `files` that exists."""
    return {name: path.lstat().st_size for name in files if (path := workdir / name).exists()}


def record_sent(record: Path, workdir: Path, files: Sequence[str]) -> None:
    """Write the names of sent files to `record`, for `removed_since`."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"workdir": str(workdir.resolve()), "files": files}))


def removed_since(record: Path, workdir: Path, files: Iterable[str]) -> list[str]:
    """Files that `record` lists as sent from `workdir` and that are not there any more.

    One that is there and not among `files` is ignored now: it is neither sent nor deleted.
    """
    try:
        sent = json.loads(record.read_text())
    except (OSError, ValueError):
        return []
    if sent["workdir"] != str(workdir.resolve()):
        return []  # sent from another directory, so nothing is known about this one
    gone = set(sent["files"]) - set(files)
    return sorted(name for name in gone if not os.path.lexists(workdir / name))


def copy_if_new(source: Path, target: Path) -> bool:
    """Copy a file unless `target` has its size and time. Returns whether it was copied."""
    if not source.is_file() or same_size_and_time(source, target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(target)
    return True


def same_size_and_time(source: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    one, other = source.stat(), target.stat()
    return one.st_size == other.st_size and int(one.st_mtime) == int(other.st_mtime)
