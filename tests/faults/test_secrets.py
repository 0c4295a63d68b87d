"""Keys are in no file, log, bundle or command line that a local cluster makes."""

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import httpx

from tests.serving import ROOT, free_port

SETTINGS = (
    *("HF_TOKEN", "WANDB_API_KEY", "OPENPIPE_API_KEY", "LANGFUSE_PUBLIC_KEY"),
    *("LANGFUSE_SECRET_KEY", "ART_API_KEY", "MY_OWN_SECRET"),
)
SECRETS = {name: f"sentinel-{name.lower()}-8c1f" for name in SETTINGS}
SENTINEL = b"sentinel-"
TASK = f"""
name: art-cpu
secrets: {{{", ".join(f"{name}: null" for name in SETTINGS)}}}
run: |
  {sys.executable} -m trainer serve --engine embedded --base-model tiny-random --require-key \\
    --port $ART_PORT --openai-port $ART_OPENAI_PORT
"""


def command_lines() -> list[str]:
    """The arguments of every process of this machine that show a key."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:  # it has ended
            continue
        if SENTINEL in arguments:
            found.append(arguments.replace(b"\0", b" ").decode(errors="replace"))
    return found


def files_with_keys(directory: Path) -> list[Path]:
    """The files that hold a key, without the user's own `.env`."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".env"]
    # `output` is checked command by command.
    return [path for path in files if path.name != "output" and SENTINEL in path.read_bytes()]


def test_keys_stay_in_memory(tmp_path: Path, art_cache: str) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (here / "task.yaml").write_text(TASK)
    (here / ".gitignore").write_text(".env\n")
    ports = {"ART_PORT": str(free_port()), "ART_OPENAI_PORT": str(free_port())}
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), **ports}
    environment |= {"ART_CACHE": art_cache, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    # Some keys are in the environment, the others in the user's own file.
    environment |= {name: SECRETS[name] for name in SETTINGS[::2]}
    (here / ".env").touch(0o600)
    (here / ".env").write_text("".join(f"{name}={SECRETS[name]}\n" for name in SETTINGS[1::2]))
    output: list[str] = []
    shown: list[str] = []

    def launcher(*arguments: str) -> None:
        """Run a command, and look at the processes of the machine while it runs."""
        with (tmp_path / "output").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "launcher", *arguments],
                cwd=here,
                env=environment,
                stdout=out,
                stderr=out,
            )
            while process.poll() is None:
                shown.extend(command_lines())
                time.sleep(0.2)
        output.append((tmp_path / "output").read_text())
        assert process.returncode == 0, output[-1]

    launcher("up", "--local", "task.yaml")
    try:
        key = {"Authorization": f"Bearer {SECRETS['ART_API_KEY']}"}
        url = f"http://127.0.0.1:{ports['ART_OPENAI_PORT']}/v1/chat/completions"
        body = {"model": "tiny-random", "messages": [{"role": "user", "content": "Hi"}]}
        body |= {"max_tokens": 4}
        deadline = time.monotonic() + 300
        while (status := httpx.post(url, json=body, headers=key, timeout=60).status_code) != 200:
            assert status == 503 and time.monotonic() < deadline  # it loads the base model
            time.sleep(0.5)
        wrong = {"Authorization": f"Bearer {SECRETS['ART_API_KEY']}-wrong"}
        assert httpx.post(url, json=body, headers=wrong, timeout=60).status_code == 401
        # The run has the keys, and does not show them by itself.
        launcher("run", "--local", "--wait", 'test "$HF_TOKEN" = ' + "${HF_TOKEN:?}")
        launcher("logs", "--local", "--bundle", "clean.tar.gz")
        launcher("pull", "--local", "--to", "pulled")
        assert files_with_keys(tmp_path) == []
        assert SENTINEL.decode() not in "".join(output)
        # A program may print its key. That is in its log, but in no bundle.
        launcher("run", "--local", "--wait", 'echo "key $ART_API_KEY and $HF_TOKEN"')
        (log,) = files_with_keys(tmp_path)
        assert log.match("runs/3/log")
        launcher("logs", "--local", "--bundle", "report.tar.gz")
        with tarfile.open(here / "report.tar.gz") as archive:
            packed = [archive.extractfile(member) for member in archive.getmembers()]
            text = b"".join(file.read() for file in packed if file)
        assert b"key [secret] and [secret]" in text and SENTINEL not in text
    finally:
        launcher("down", "--local", "--discard", "--yes")
    assert shown == []
