"""What the launcher does for the page: its address, `open`, and a report after `down`."""

import http.server
import json
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from launcher import report
from launcher.endpoints import Endpoints, page_link
from launcher.testing import FakeProvider

Invoke = Callable[..., Result]
CHECKPOINT = "demo/models/m/checkpoints/0001"


class Locked(http.server.BaseHTTPRequestHandler):
    """A server whose page wants a key, and gives a token for it."""

    def do_GET(self) -> None:
        self._answer(401, {})

    def do_POST(self) -> None:
        key = self.headers["authorization"] == "Bearer sesame"
        self._answer(200 if key and self.path == "/api/login-token" else 401, {"token": "once"})

    def _answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def locked() -> Iterator[Endpoints]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield Endpoints.on_loopback(server.server_address[1], 1)
        server.shutdown()


def test_a_page_that_wants_a_key_is_linked_with_a_token_and_never_the_key(
    locked: Endpoints,
) -> None:
    assert page_link(locked, "sesame") == f"{locked.control}/?token=once"
    assert page_link(locked, None) == f"{locked.control}/"
    assert page_link(locked, "wrong") is None
    assert page_link(Endpoints.on_loopback(9, 9), "sesame") is None


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.endpoints.wait_while_healthy", lambda *_: None)


@pytest.mark.usefixtures("ended")
def test_tunnel_prints_the_address_of_the_page(invoke: Invoke, provider: FakeProvider) -> None:
    result = invoke("tunnel", provider=provider)
    assert f"Page: http://127.0.0.1:{provider.port}/\n" in result.stderr
    assert "Page" not in result.stdout  # which a shell evaluates


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("has_browser", [True, False])
def test_open_opens_a_browser_or_prints_the_address(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, has_browser: bool
) -> None:
    opened: list[str] = []

    def browse(url: str) -> bool:
        opened.append(url)
        return has_browser

    monkeypatch.setattr(webbrowser, "open", browse)
    result = invoke("open", provider=provider)
    address = f"http://127.0.0.1:{provider.port}/"
    assert result.exit_code == 0 and opened == [address]
    assert result.stdout == ("" if has_browser else f"{address}\n")


PROGRAMS = {
    "writes": '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo report > "$2"\n',
    "fails": "#!/bin/sh\necho broken >&2; exit 3\n",
    "hangs": "#!/bin/sh\nexec sleep 60\n",
    "is absent": None,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_down_writes_a_report_and_ends_the_cluster_whatever_that_does(
    invoke: Invoke,
    provider: FakeProvider,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: str,
) -> None:
    script = tmp_path / "python"
    if text := PROGRAMS[program]:
        script.write_text(text)
        script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(report, "TIMEOUT", 0.5)
    provider.checkpoints[CHECKPOINT] = b"lora"
    result = invoke("down", "--yes", provider=provider)
    assert result.exit_code == 0 and provider.ended == ["art"]
    written = Path("checkpoints/demo/models/m/report.html")
    assert written.exists() == (program == "writes")
    assert (f"Report: {written}" in result.stderr) == (program == "writes")
