"""What tests of the launcher's verbs share: the command line, and a provider with a cluster."""

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kit.cli import show_error
from kit.errors import KitError
from launcher.cli.main import cli
from launcher.provider import Provider
from launcher.testing import FakeProvider

TASK = "name: demo\nenvs: {BASE_MODEL: tiny-random}\nsecrets: {HF_TOKEN: null}\nrun: serve\n"
Invoke = Callable[..., Result]


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def healthy_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `launcher` in a folder with one task; errors are told as the program tells them."""
    monkeypatch.chdir(tmp_path)
    Path("task.yaml").write_text(TASK)

    def run(*arguments: str, provider: Provider) -> Result:
        result = CliRunner(mix_stderr=False).invoke(cli, arguments, obj=provider)
        if isinstance(result.exception, KitError):
            with CliRunner(mix_stderr=False).isolation() as (_, err):
                show_error(result.exception)
                assert err is not None
                result.stderr_bytes = err.getvalue()
        return result

    return run


@pytest.fixture
def provider(healthy_port: int, invoke: Invoke) -> FakeProvider:
    """A provider with the cluster `art` up."""
    provider = FakeProvider(port=healthy_port)
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0
    return provider
