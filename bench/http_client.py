"""Compares ways to send many requests at once: their cost for the program that sends them.

    python bench/http_client.py [--at-once 16 64 256] [--requests 768] [--write]

A server in another process answers each request after a moment with 30 kB of JSON, as the gateway
answers a chat with log probabilities. The client's processor time per request is what an agent's
harness pays; with hundreds of runs at once it decides whether a GPU waits.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Table, machine, write_report
from kit.http_client import HttpClient

Send = Callable[[], Awaitable[Any]]
PACKAGES = ("httpx", "httpcore", "aiohttp")
DELAY_S = 0.2


def serve(listening: Any) -> None:
    body = json.dumps({"logprobs": [{"token": "word", "logprob": -0.5}] * 800}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    answer = head % len(body) + body

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has left
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(DELAY_S)
                writer.write(answer)

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
        listening.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def one_client(stack: AsyncExitStack, url: str) -> Send:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    client = await stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=None))
    return lambda: client.get(url)


async def many_clients(stack: AsyncExitStack, url: str) -> Send:
    """A client for each request, which later requests use again."""
    context = httpx.create_ssl_context()
    idle: list[httpx.AsyncClient] = []

    async def send() -> None:
        if not idle:
            client = httpx.AsyncClient(timeout=None, verify=context)
            idle.append(await stack.enter_async_context(client))
        client = idle.pop()
        await client.get(url)
        idle.append(client)

    return send


async def ours(stack: AsyncExitStack, url: str) -> Send:
    client = HttpClient()
    stack.push_async_callback(client.aclose)
    return lambda: client.request("GET", url)


async def with_aiohttp(stack: AsyncExitStack, url: str) -> Send:
    session = await stack.enter_async_context(
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    )

    async def send() -> None:
        async with session.get(url) as response:
            await response.read()

    return send


WAYS = {
    "httpx, one client": one_client,
    "httpx, a client per request": many_clients,
    "aiohttp": with_aiohttp,
    "ours, on aiohttp": ours,
}


async def measure(way: Any, url: str, requests: int, at_once: int) -> tuple[float, float]:
    """Return the seconds on the clock and of the processor."""
    async with AsyncExitStack() as stack:
        send: Send = await way(stack, url)
        slots = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with slots:
                await send()

        await asyncio.gather(*(one() for _ in range(at_once)))  # opens the connections
        began, busy = time.monotonic(), time.process_time()
        await asyncio.gather(*(one() for _ in range(requests)))
        return time.monotonic() - began, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--write", action="store_true", help="write bench/results/http_client.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    listening: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(listening,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{listening.get()}/"
    table = Table(["at once", "client", "requests/s", "processor time per request"])
    for at_once in arguments.at_once:
        for name, way in WAYS.items():
            wall, busy = asyncio.run(measure(way, url, arguments.requests, at_once))
            table.add(
                [
                    *(str(at_once), name, f"{arguments.requests / wall:,.0f}"),
                    f"{1000 * busy / arguments.requests:.2f} ms",
                ]
            )
    server.terminate()
    what = (
        f"{arguments.requests} requests, each answered after {DELAY_S:g} s with 30 kB; the server "
        "runs in another process"
    )
    print(f"{what}\n\n{table}\n\n{machine(load, PACKAGES)}")
    if arguments.write:
        write_report("http_client", what, table, load, packages=PACKAGES)


if __name__ == "__main__":
    main()
