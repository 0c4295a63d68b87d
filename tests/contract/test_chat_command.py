"""`trainer chat` against a real server: a pipe gets plain answers, and errors say what to do."""

import subprocess
import sys
from typing import Any

from tests.environments import client_environment


def chat(*arguments: str, typed: str = "Hello\n\nAgain\n") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", "chat", *arguments],
        input=typed.encode(), env=client_environment(), capture_output=True, timeout=120,
    )  # fmt: skip


def test_a_pipe_gets_the_answers_and_nothing_else(server: Any) -> None:
    model = {"name": "talker", "project": "chat", "base_model": "tiny-random", "trainable": True}
    server.post("/register", model)
    server.post("/_prepare_backend_for_training", {"model": model})
    arguments = ("--url", server.openai, "--max-tokens", "3", "--system", "Be short.")
    done = chat("talker", *arguments)
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    assert done.stdout.count(b"\n") >= 2 and b"error" not in done.stdout
    unknown = chat("talker@7", *arguments)
    assert unknown.returncode == 1 and unknown.stdout == b"" and b"error" in unknown.stderr
    assert b"hint" in unknown.stderr and b"Traceback" not in unknown.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    done = chat("anything", "--url", "http://127.0.0.1:9/v1")
    assert done.returncode == 1 and b"http://127.0.0.1:9` did not answer" in done.stderr
    assert b"hint: Start it with `trainer serve`" in done.stderr
