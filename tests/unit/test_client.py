"""The default address of `ArtBackend`, and the errors it raises."""

import httpx
import pytest

from trainer.client import ArtBackend
from trainer.client.art_backend import error_of
from trainer.errors import BadRequest, NotFound, NotReady, TrainerError


async def test_the_environment_sets_the_default_address_and_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ART_BASE_URL", raising=False)
    monkeypatch.delenv("ART_API_KEY", raising=False)
    plain = ArtBackend()._http
    assert str(plain.base_url) == "http://127.0.0.1:7999" and "authorization" not in plain.headers
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:17999")
    monkeypatch.setenv("ART_API_KEY", "secret")
    from_environment = ArtBackend()._http
    assert str(from_environment.base_url) == "http://127.0.0.1:17999"
    assert from_environment.headers["authorization"] == "Bearer secret"
    explicit = ArtBackend("http://127.0.0.1:9", "own")._http
    assert str(explicit.base_url) == "http://127.0.0.1:9"
    assert explicit.headers["authorization"] == "Bearer own"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, BadRequest), (404, NotFound), (503, NotReady), (500, TrainerError)],
)
def test_an_error_response_raises_the_error_of_the_server(
    status: int, kind: type[TrainerError]
) -> None:
    body = {"error": {"message": "No", "hint": "Do this"}}
    error = error_of(httpx.Response(status, json=body))
    assert (type(error), error.message, error.hint) == (kind, "No", "Do this")
