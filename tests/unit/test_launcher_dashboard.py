"""`launcher tunnel --dashboard`: Ray's dashboard of a server that runs on Ray."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping

import pytest
from click.testing import Result

from launcher.ray_head import RAY_HEAD
from launcher.testing import FakeProvider
from tests.serving import free_port

Invoke = Callable[..., Result]
HEAD = "HEAD=10.0.0.5:7998\nENGINE=embedded\nART_API_KEY=the-key\n"
DASHBOARD = 8265


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.endpoints.wait_while_healthy", lambda *_: None)


@pytest.fixture
def requested(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The ports that the tunnels to `provider` requested. Its server runs on Ray."""
    provider.files[RAY_HEAD] = f"{HEAD}DASHBOARD={DASHBOARD}\n"
    requested: list[dict[int, int]] = []
    tunnel = provider.tunnel

    def recorded(
        name: str, ports: Mapping[int, int]
    ) -> contextlib.AbstractContextManager[Mapping[int, int]]:
        requested.append(dict(ports))
        return tunnel(name, ports)

    monkeypatch.setattr(provider, "tunnel", recorded)
    return requested


def test_the_dashboard_is_forwarded_only_on_request(
    invoke: Invoke, provider: FakeProvider, requested: list[dict[int, int]]
) -> None:
    plain = invoke("tunnel", provider=provider)
    assert requested == [{7999: 7999, 8000: 8000}] and "dashboard" not in plain.stderr
    result = invoke("tunnel", "--dashboard", provider=provider)
    assert result.exit_code == 0, result.stderr
    assert requested[1:] == [{DASHBOARD: DASHBOARD}, {7999: 7999, 8000: 8000}]
    assert (
        f"Ray's dashboard: http://127.0.0.1:{provider.port} "
        "(print its token with `ssh art cat .art-cluster/ray-token`)\n" in result.stderr
    )
    assert result.stdout == plain.stdout  # which a shell evaluates


@pytest.mark.parametrize("flags", [(), ("--dashboard",)])
def test_another_local_port_implies_the_dashboard(
    invoke: Invoke, provider: FakeProvider, requested: list[dict[int, int]], flags: tuple[str, ...]
) -> None:
    result = invoke("tunnel", *flags, "--dashboard-port", "18265", "--json", provider=provider)
    assert requested[0] == {DASHBOARD: 18265}
    assert json.loads(result.stdout)["dashboard"] == f"http://127.0.0.1:{provider.port}"


@pytest.mark.usefixtures("requested")
def test_neither_the_key_nor_the_token_is_printed(invoke: Invoke, provider: FakeProvider) -> None:
    token = hashlib.sha256(b"ray:the-key").hexdigest()
    for flags in ((), ("--json",)):
        result = invoke("tunnel", "--dashboard", *flags, provider=provider)
        assert not any(it in result.stdout + result.stderr for it in ("the-key", token))


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (None, "The server of cluster `art` does not run on Ray: it has no dashboard"),
        (HEAD, "Ray's dashboard is not installed on cluster `art`"),
    ],
)
def test_a_server_without_a_dashboard_says_how_to_get_one(
    invoke: Invoke, provider: FakeProvider, note: str | None, message: str
) -> None:
    if note:
        provider.files[RAY_HEAD] = note
    result = invoke("tunnel", "--dashboard", provider=provider)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith(f"error: {message}\n\nhint: Launch ")
    assert "`launcher up art-multi-node --env RAY_DASHBOARD=1 -c NAME`" in result.stderr


@pytest.mark.usefixtures("requested")
def test_a_dashboard_that_does_not_answer_is_an_error(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.port = free_port()
    result = invoke("tunnel", "--dashboard", provider=provider)
    assert result.exit_code == 1
    assert result.stderr == (
        "error: Ray's dashboard on cluster `art` does not answer\n\n"
        "hint: Read its log with `launcher logs server -c art`\n"
    )
