"""Answers that several pages ask for are computed once, and never older than the files."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from bench.page_run import write_eval, write_run
from trainer.page import api, cache, series
from trainer.page.cache import Cache
from trainer.page.events import Events
from trainer.page.reader import Runs
from trainer.page.view import create_app

RUN = "/api/runs/demo/synthetic"


def settle(root: Path) -> None:
    """Date every file back, as if nothing had been written for a while."""
    for path in (root, *root.rglob("*")):
        os.utime(path, (time.time() - 60, time.time() - 60))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting a time changes a file too, so only the time of its content counts here."""
    old = cache.identity

    def identity(path: Path) -> tuple[tuple[int, ...], bool]:
        stamp, _ = old(path)
        return stamp, time.time_ns() - path.stat().st_mtime_ns > 100_000_000

    monkeypatch.setattr(cache, "identity", identity)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = write_run(tmp_path, steps=3, attempts=8, generations=4)
    write_eval(directory)
    settle(tmp_path)
    return directory


@pytest.fixture
async def client(tmp_path: Path, run: Path) -> AsyncIterator[httpx.AsyncClient]:
    runs = Runs(tmp_path)
    transport = httpx.ASGITransport(create_app(runs, Events(runs), version="test"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def test_pages_that_ask_for_the_same_share_one_computation(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Any] = []
    compute = series.series

    def counted(*arguments: Any, **settings: Any) -> Any:
        computed.append(arguments)
        return compute(*arguments, **settings)

    monkeypatch.setattr(series, "series", counted)
    found = await asyncio.gather(*(client.get(f"{RUN}/series") for _ in range(3)))
    assert len({answer.text for answer in found}) == 1 and len(computed) == 1
    assert {answer.headers["x-content-type-options"] for answer in found} == {"nosniff"}
    await client.get(f"{RUN}/series?since=1")
    assert len(computed) == 2


PATHS = [
    *("", "/series", "/steps", "/steps/2", "/steps/2/groups/1", "/attempts/2/1"),
    *("/attempts/2/1/tokens", "/examples", "/audit", "/compare?a=1&b=2", "/config"),
    *("/evals", "/logs", "/checkpoints", "/compare?a=1&b=2&other=demo/synthetic"),
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_browser_that_has_an_answer_does_not_get_it_again(
    client: httpx.AsyncClient, path: str
) -> None:
    first = await client.get(RUN + path)
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = await client.get(RUN + path, headers={"If-None-Match": known})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
        assert again.headers["cache-control"] == "no-cache"
    assert (await client.get(RUN + path, headers={"If-None-Match": '"x"'})).text == first.text


async def test_an_answer_changes_with_its_files_at_once(
    client: httpx.AsyncClient, run: Path, tmp_path: Path
) -> None:
    before = (await client.get(f"{RUN}/steps")).json()
    for step in range(4, 8):  # written without a pause: the clock may not even tick
        with (run / "history.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "num_gradient_steps": 1, "train/reward": 0.5}}\n')
        if step % 2:
            settle(tmp_path)  # then the answer before was held
        found = (await client.get(f"{RUN}/steps")).json()
        assert found["step"] == [*before["step"], *range(4, step + 1)]
    settle(tmp_path)
    assert (await client.get(f"{RUN}/steps/2")).status_code == 200
    (run / "batches" / "0002.db").unlink()
    assert (await client.get(f"{RUN}/steps/2")).status_code == 404
    assert (await client.get(f"{RUN}/steps")).json()["kept"][1] is False
    evals = (await client.get(f"{RUN}/evals")).json()["evals"]
    settle(tmp_path)
    assert len((await client.get(f"{RUN}/evals")).json()["evals"]) == len(evals) == 1
    (run / "evals" / "more.jsonl").write_text("")
    assert len((await client.get(f"{RUN}/evals")).json()["evals"]) == 2
    shutil.rmtree(run)
    assert (await client.get(f"{RUN}/steps")).status_code == 404


async def test_what_the_run_does_now_is_never_held(tmp_path: Path, run: Path) -> None:
    class Knows(api.Offline):
        now: Any = "training"

        def state(self, project: str, name: str) -> Any:
            return self.now

    app = FastAPI()
    app.include_router(api.routes(Runs(tmp_path), version="test", live=Knows()))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as client:
        for Knows.now in ("training", "idle", "training"):
            assert (await client.get(RUN)).json()["verdict"]["state"] == Knows.now


async def test_the_cache_stays_within_its_bound_and_holds_no_errors(
    tmp_path: Path, run: Path
) -> None:
    held = Cache(Runs(tmp_path), lambda *_: None, most_bytes=10_000)

    async def ask(query: str, size: int, status: int = 200) -> None:
        async def compute(request: Request) -> Response:
            return Response(b"x" * size, status, media_type="application/json")

        scope: Any = {"type": "http", "method": "GET", "path": "/x", "query_string": query.encode()}
        scope |= {"headers": [], "server": ("127.0.0.1", 80), "scheme": "http"}
        scope |= {"path_params": {"project": "demo", "name": "synthetic"}}
        await held.answer(f"{cache.RUN}/steps", Request(scope), compute)

    for number in range(50):
        await ask(f"n={number}", 1000)
        assert held.size <= 10_000
    assert list(held._held) == [f"/x?n={number}" for number in range(44, 50)]
    await ask("large", 9000)
    await ask("error", 10, 404)
    assert len(held._held) == 6 and not held._locks
    for _ in range(2):
        await ask("n=44", 1000)
    assert held.size == sum(cache._size(key, it) for key, it in held._held.items())
