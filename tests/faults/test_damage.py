"""Damaged state, deleted checkpoints and a stop with clients at work, on a real server."""

import shutil
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.patient import BASE, MODEL, Refused, ask_for_step, sample, train
from tests.serving import Serving

DATABASES = ("ledger.db", "rollouts.db", "responses.db", "threads.db")


def health(serving: Serving) -> dict[str, Any]:
    answer = httpx.get(f"{serving.control}/health", timeout=60)
    assert answer.status_code == 200
    report: dict[str, Any] = answer.json()
    return report


def open_to_others(state: Path) -> list[Path]:
    return [
        path
        for path in (state, *state.rglob("*"))
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_symlink()
    ]


def test_no_damaged_file_ends_the_server_and_a_stop_is_bounded(tmp_path: Path) -> None:
    state, run = tmp_path / ".art", tmp_path / ".art" / "faults" / "models" / "run"
    with Serving(tmp_path, BASE) as serving:
        train(serving, 1)
        train(serving, 2)
        assert health(serving) == {"status": "ok"}
        assert open_to_others(state) == []
        serving.process.kill()
        serving.process.wait(120)

        (run / "journal.0003.json").write_bytes(b"\0" * 100)
        (state / "serving.json").write_text('{"unexpected": true}')
        for name in DATABASES:
            (state / name).write_bytes(b"this is not a database" * 1000)
            (state / f"{name}-wal").unlink(missing_ok=True)
        with (run / "history.jsonl").open("ab") as file:
            file.write(b'\xff\xfe{"cut')
        state.chmod(0o755)
        serving.start()
        report = health(serving)
        while report["status"] == "starting":
            time.sleep(0.1)
            report = health(serving)
        assert report["status"] == "degraded"
        for name in ("journal.0003.json", "serving.json", *DATABASES):
            assert any(f"{name}.damaged-" in reason for reason in report["reasons"]), name
        assert open_to_others(state) == []
        train(serving, 3)
        assert sample(serving) == 3

        # The newest checkpoint is deleted while it is served: no step goes by unnoticed.
        shutil.move(run / "checkpoints" / "0003", tmp_path / "0003")
        with pytest.raises(Refused, match=r"409: .*checkpoints/0003"):
            ask_for_step(serving, 4)
        assert serving.post("/_get_step", MODEL) == 3
        shutil.move(tmp_path / "0003", run / "checkpoints" / "0003")
        ask_for_step(serving, 4)
        assert serving.post("/_get_step", MODEL) == 4

        # A model behind a link is not deleted through it.
        shutil.move(state / "faults", tmp_path / "elsewhere")
        (state / "faults").symlink_to(tmp_path / "elsewhere")
        answer = httpx.delete(f"{serving.control}/v1/preview/models/faults~run", timeout=60)
        assert answer.status_code == 409 and "symbolic link" in answer.text
        assert (tmp_path / "elsewhere" / "models" / "run" / "checkpoints" / "0004").is_dir()

        # A client that never reads its answer, and one that never stops sampling.
        chat: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "x"}]}
        chat |= {"n": 16, "max_tokens": 400, "ignore_eos": True, "stream": True}
        url = f"{serving.openai}/v1/chat/completions"
        with httpx.stream("POST", url, json=chat, timeout=60) as stream:
            assert stream.status_code == 200
            serving.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            waiting = threading.Thread(target=serving.process.wait, args=(60,))
            waiting.start()
            waiting.join()
        assert time.monotonic() - began < 25  # ten, and a busy machine
        assert serving.process.returncode == 0
