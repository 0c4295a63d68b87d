"""Which files of a workdir go to a cluster, and copies of them on this machine."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kit.state_dir import STATE_DIR
from launcher.errors import ProviderError, TaskError

SKYIGNORE = ".skyignore"
# Whatever an ignore file says: secrets, and what the cluster makes for itself.
_NEVER = ("/.env", "/.venv/", f"/{STATE_DIR}/", "/.git/")


def select(workdir: Path) -> list[str]:
    """The files of `workdir` that go to a cluster, relative to it.

    As with `sky launch` a `.skyignore` takes the place of every `.gitignore`.
    """
    if not workdir.is_dir():
        raise TaskError(f"There is no workdir `{workdir}`", hint="Run from the project's root")
    return _not_ignored(workdir, *(f"--exclude={pattern}" for pattern in _NEVER))


def refuse_open_secrets(given: object) -> None:
    """Stop before SkyPilot, which knows the ignore files only, sends a workdir's `.env` along."""
    if not isinstance(given, str):
        return  # none, or one that SkyPilot takes from git
    workdir = Path(given)
    if (workdir / ".env").is_file() and _not_ignored(workdir, "--", ".env"):
        which = SKYIGNORE if (workdir / SKYIGNORE).is_file() else ".gitignore"
        raise TaskError(
            f"`{workdir / '.env'}` would go to the cluster, with every secret in it",
            hint=f"Add a line `.env` to `{workdir / which}`",
        )


def _not_ignored(workdir: Path, *arguments: str) -> list[str]:
    skyignore = workdir.resolve() / SKYIGNORE
    rules = f"--exclude-from={skyignore}" if skyignore.is_file() else "--exclude-standard"
    with tempfile.TemporaryDirectory() as empty:
        # An empty repository over the tree: every file that is not ignored is untracked in it.
        try:
            subprocess.run(["git", "init", "--quiet", "--bare", empty], check=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            raise ProviderError("git does not run here", hint="Install git") from exc
        return sorted(_listed(workdir, empty, [rules, *arguments]))


def _listed(tree: Path, git_dir: str, rules: Sequence[str]) -> Iterator[str]:
    command = ["git", f"--git-dir={git_dir}", f"--work-tree={tree.resolve()}", "ls-files", "-z"]
    done = subprocess.run([*command, "--others", *rules], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise ProviderError(
            f"`{tree}` cannot be listed: {done.stderr.strip()}", hint="Check that you may read it"
        )
    for name in filter(None, done.stdout.split("\0")):
        if name.endswith("/"):  # a repository inside this one: git does not look into it
            yield from (name + inner for inner in _listed(tree / name, git_dir, rules))
        else:
            yield name


def size(workdir: Path, files: Iterable[str]) -> dict[str, int]:
    """Bytes of each of `files` that is there."""
    return {name: path.lstat().st_size for name in files if (path := workdir / name).exists()}


def remember(record: Path, workdir: Path, files: Sequence[str]) -> None:
    """Note in `record` what was sent, so that `forgotten` can tell what is gone since."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"workdir": str(workdir.resolve()), "files": files}))


def forgotten(record: Path, workdir: Path, files: Iterable[str]) -> list[str]:
    """What `record` says was sent from `workdir` and is not among `files`."""
    try:
        sent = json.loads(record.read_text())
    except (OSError, ValueError):
        return []
    if sent["workdir"] != str(workdir.resolve()):
        return []  # another tree: its files are not gone, they are elsewhere
    return sorted(set(sent["files"]) - set(files))


def copy_if_new(source: Path, target: Path) -> bool:
    """Copy a file unless `target` has its size and time; whether it did."""
    if not source.is_file() or same(source, target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(target)
    return True


def same(source: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    one, other = source.stat(), target.stat()
    return one.st_size == other.st_size and int(one.st_mtime) == int(other.st_mtime)
