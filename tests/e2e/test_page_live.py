"""The page in a real Chromium, beside a server that wants a key and a run that trains."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.e2e.page_view import View
from tests.serving import Serving

LETTERS = Path(__file__).parent / "small_letters"
EPOCHS = 4


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    """A server that other machines can reach, and so wants a key."""
    settings = {"ART_API_KEY": "a key of the tests", "ART_CACHE": art_cache}
    directory = tmp_path_factory.mktemp("live")
    with Serving(directory, "tiny-random", host="0.0.0.0", **settings) as serving:
        yield serving


def test_off_loopback_nothing_is_served_without_the_key(serving: Serving) -> None:
    port = serving.control.rpartition(":")[2]
    for host in ("127.0.0.1", socket.gethostbyname(socket.gethostname())):
        for path in ("/", "/?token=guess", "/files/main.js", "/api/runs", "/api/events"):
            answer = httpx.get(f"http://{host}:{port}{path}", timeout=60)
            assert answer.status_code == 401, (host, path)
            assert "<main>" not in answer.text and "export" not in answer.text
        made = httpx.post(f"http://{host}:{port}/api/login-token", timeout=60)
        assert made.status_code == 401


def test_a_reader_watches_a_run_learn_and_reads_it_after_the_server_has_ended(
    page: Page, serving: Serving, tmp_path: Path
) -> None:
    home = serving.control.replace("0.0.0.0", "127.0.0.1")
    token = serving.post("/api/login-token", {})["token"]
    page.goto(f"{home}/?token={token}")
    expect(page.locator("#verdict")).to_contain_text("There is no run yet.")
    assert token not in page.url
    assert httpx.get(f"{home}/?token={token}", timeout=60).status_code == 401  # it opens once
    command = [sys.executable, "-m", "trainer", "finetune"]
    command.append(f"--config_file={_config(serving, tmp_path)}")
    curve = page.locator("#reward figure.large")
    with (
        (tmp_path / "finetune.log").open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as training,
    ):
        expect(curve).to_have_attribute("data-last", re.compile(r"[1-9]"))
        page.evaluate("globalThis.stayed = true")
        points = int(curve.get_attribute("data-points") or 0)
        _read_a_step(page)
        assert training.wait(300) == 0, (tmp_path / "finetune.log").read_text()[-3000:]
    expect(curve).to_have_attribute("data-last", str(EPOCHS))
    assert int(curve.get_attribute("data-points") or 0) > points
    assert page.evaluate("globalThis.stayed") is True  # it grew without a reload
    for part in ("sampling", "gradients", "idle"):
        expect(page.locator("#time figure.large")).to_contain_text(part)
    serving.process.send_signal(signal.SIGTERM)
    serving.process.wait(120)
    expect(page.locator("#connection")).to_contain_text("Connection lost")
    shutil.copytree(serving.state, tmp_path / "pulled")
    with View(tmp_path / "pulled") as address:
        page.goto(f"{address}#/run/e2e/letters")
        expect(curve).to_have_attribute("data-last", str(EPOCHS))
        _read_a_step(page)


def _read_a_step(page: Page) -> None:
    page.locator(".stepbar").click(position={"x": 2, "y": 40})
    expect(page.locator(".batch h3")).to_have_text("Batch of step 1")
    page.locator(".rows .row").first.click()
    attempt = page.locator(".attempt").first
    expect(attempt.locator(".message.assistant")).to_be_visible()
    attempt.get_by_role("button", name="Tokens").click()
    token = page.locator(".tokens .token").last
    expect(token).to_be_visible()
    for colour in ("Advantage", "Engine", "Mask", "Logprob"):
        page.locator(".choice label", has_text=colour).last.click()
        expect(page.locator(".legend")).to_be_visible()


def _config(serving: Serving, directory: Path) -> Path:
    """The agent of `small_letters`, on the ports and with the key of `serving`."""
    for path in LETTERS.iterdir():
        if path.is_file():
            shutil.copy(path, directory)
    ports = [url.rpartition(":")[2] for url in (serving.control, serving.openai)]
    key = json.dumps(serving.headers["Authorization"].removeprefix("Bearer "))
    config = directory / "config.yaml"
    text = config.read_text().replace("7999", ports[0]).replace("8000", ports[1])
    text = text.replace("temperature: 1.0", f"temperature: 1.0, api_key: {key}")
    text = text.replace("name: letters, project", f"api_key: {key}, name: letters, project")
    config.write_text(text.replace("num_epochs: 2", f"num_epochs: {EPOCHS}"))
    return config
