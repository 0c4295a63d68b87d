"""Measures how quickly `/health` and `/_get_step` respond while steps train.

    python bench/health.py [--model tiny-random] [--groups 8] [--members 8] [--tokens 400] [--write]

A separate process sends groups that are in the ledger to a real `trainer serve`, step after step,
while both routes are requested every 10 ms over connections that stay open.
Goal: 50 ms. ART's clients of generation 1 give up after 5 s.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Table, machine, write_report  # noqa: E402
from trainer.server.ledger import Entry, Ledger  # noqa: E402

EVERY = 0.01


def groups(arguments: argparse.Namespace, ledger: Ledger) -> list[Any]:
    """Groups in the form a client sends, with choices from the ledger instead of an engine."""
    draw = random.Random(1)
    message = {"role": "user", "content": "Tell me about numbers"}
    prompt = [draw.randrange(256) for _ in range(64)]

    def member(place: int) -> Any:
        ids = [draw.randrange(256) for _ in range(arguments.tokens)]
        logprobs = [-5.5 - draw.random() / 10 for _ in ids]
        ledger.record(Entry("bench/health", 0, "", None, prompt, ids, logprobs), "numbers")
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {
            **{"index": 0, "finish_reason": "length", "logprobs": {"content": content}},
            "message": {"role": "assistant", "content": "numbers"},
        }
        return {"messages_and_choices": [message, choice], "reward": float(place % 2)}

    members = range(arguments.members)
    return [{"trajectories": [member(n) for n in members]} for _ in range(arguments.groups)]


def train(arguments: argparse.Namespace) -> None:
    """Run the training client's process, which sends the same body for every step."""
    body = Path(arguments.body).read_bytes()
    with httpx.Client(base_url=f"http://127.0.0.1:{arguments.port}", timeout=None) as client:
        model = json.loads(body)["model"]
        client.post("/_prepare_backend_for_training", json={"model": model}).raise_for_status()
        print("ready", flush=True)
        sys.stdin.readline()
        headers = {"content-type": "application/json"}
        for _ in range(arguments.steps):
            client.post("/_train_model", content=body, headers=headers).raise_for_status()
    print("done", flush=True)


async def poll(port: int, head: bytes, late: list[float], until: asyncio.Event) -> None:
    """Send requests one after the other, at most one every `EVERY` seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not until.is_set():
        started = time.monotonic()
        writer.write(head)
        headers = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in headers.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(int(length.split(b":")[1]))
        assert headers.startswith(b"HTTP/1.1 200"), headers
        late.append(time.monotonic() - started)
        await asyncio.sleep(max(0.0, EVERY - late[-1]))
    writer.close()


async def measure(arguments: argparse.Namespace, directory: Path) -> tuple[Table, str]:
    port = 18600 + os.getpid() % 1000
    ledger = Ledger(directory / "ledger.db")
    wire = {"name": "health", "project": "bench", "base_model": arguments.model}
    body = {"model": wire, "config": {"learning_rate": 1e-6}}
    text = json.dumps({**body, "trajectory_groups": groups(arguments, ledger)})
    (directory / "body.json").write_text(text)
    ledger.close()
    serve = [sys.executable, "-m", "trainer", "serve", "--base-model", arguments.model]
    serve += ["--engine", "embedded", "--port", str(port), "--openai-port", "0"]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [*serve, "--state-dir", str(directory)],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # a second thread would spin while it waits
            stdout=log,
            stderr=log,
        )
    try:
        while not _is_up(port):
            assert server.poll() is None, (directory / "log").read_text()
            await asyncio.sleep(0.2)
        found, seconds = await _while_training(arguments, port, directory / "body.json")
    finally:
        server.terminate()
        server.wait()
    table = Table(["route", "requests", "p50 ms", "p99 ms", "max ms"])
    for name, late in found.items():
        ranked = sorted(late)
        places = (len(ranked) // 2, int(len(ranked) * 0.99), -1)
        table.add([name, str(len(late)), *(f"{ranked[place] * 1e3:.2f}" for place in places)])
    return table, f"{len(text) / 1e6:.1f} MB and {seconds / arguments.steps:.1f} s per step"


async def _while_training(
    arguments: argparse.Namespace, port: int, body_file: Path
) -> tuple[dict[str, list[float]], float]:
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--steps", str(arguments.steps)),
        *("--port", str(port), "--body", str(body_file)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdin and client.stdout
    assert await client.stdout.readline() == b"ready\n"
    body = b'{"name": "health", "project": "bench"}'
    head = (
        "POST /_get_step HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    heads = {"/health": b"GET /health HTTP/1.1\r\nHost: server\r\n\r\n", "/_get_step": head + body}
    late: dict[str, list[float]] = {name: [] for name in heads}
    until = asyncio.Event()
    polls = [asyncio.create_task(poll(port, heads[name], late[name], until)) for name in heads]
    started = time.monotonic()
    client.stdin.write(b"go\n")
    assert await client.stdout.readline() == b"done\n"
    until.set()
    await asyncio.gather(*polls)
    return late, time.monotonic() - started


def _is_up(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"])
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8, help="trajectories per group")
    parser.add_argument("--tokens", type=int, default=400, help="tokens per trajectory")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write bench/results/health.md")
    for hidden in ("--port", "--body"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.body:
        train(arguments)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        table, size = asyncio.run(measure(arguments, Path(directory)))
    what = f"`{arguments.model}`, {arguments.steps} steps of {arguments.groups} groups: {size}"
    print(f"{what}\n\n{table}\n\n{machine(load)}")
    if arguments.write:
        write_report("health", what, table, load)


if __name__ == "__main__":
    main()
