"""The actor's own port: it answers who knows the secret, and the newest connection only."""

import asyncio
import errno
import json
from pathlib import Path

import pytest

from trainer.machines.machine_actor import MachineActor

CALL = json.dumps({"id": 1, "method": "load", "params": {"lora": "x", "hashes": {}}}).encode()


async def answer(port: int, secret: str) -> bytes:
    """What the actor says to a call after this greeting; nothing if it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{secret}\n".encode() + CALL + b"\n")
    try:
        return await reader.readline()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_connection_needs_the_secret_which_is_good_for_one(tmp_path: Path) -> None:
    actor = MachineActor(str(tmp_path), "127.0.0.1")
    port, secret = await actor.open()
    told = json.loads(await answer(port, secret))
    assert told["id"] == 1 and "A LoRA needs adapter_config.json" in told["error"]["message"]
    assert await answer(port, secret) == b""
    assert (await actor.open())[0] == port
    for guess in ("", "guess", "0" * 64):
        assert await answer(port, guess) == b""
    port, secret = await actor.open()
    assert await answer(port, "guess") == b""
    assert await answer(port, secret)  # a guess before it changes nothing
    assert await answer(port, "") == b""  # also when no secret is expected
    await actor.stop()


async def test_a_full_disk_there_is_an_answer_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = MachineActor(str(tmp_path), "127.0.0.1")

    def full(hashes: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(actor._store, "complete", full)
    told = json.loads(await answer(*await actor.open()))
    assert "No space left on device" in told["error"]["message"]
    await actor.stop()


async def test_a_stranger_does_not_end_the_connection_of_the_server(tmp_path: Path) -> None:
    actor = MachineActor(str(tmp_path), "127.0.0.1")
    port, secret = await actor.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{secret}\n".encode() + CALL + b"\n")
    assert await reader.readline()
    assert await answer(port, "guess") == b""
    writer.write(CALL + b"\n")
    assert json.loads(await reader.readline())["id"] == 1
    writer.close()
    await actor.stop()
