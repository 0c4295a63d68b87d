"""Where the client finds the server when nobody says, and what it makes of a refusal."""

import httpx
import pytest

from trainer.client import ArtBackend, _error
from trainer.errors import BadRequest, NotFound, NotReady, TrainerError


async def test_it_goes_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ART_BASE_URL", raising=False)
    monkeypatch.delenv("ART_API_KEY", raising=False)
    plain = ArtBackend()._http
    assert str(plain.base_url) == "http://127.0.0.1:7999" and "authorization" not in plain.headers
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:17999")
    monkeypatch.setenv("ART_API_KEY", "secret")
    told = ArtBackend()._http
    assert str(told.base_url) == "http://127.0.0.1:17999"
    assert told.headers["authorization"] == "Bearer secret"
    given = ArtBackend("http://127.0.0.1:9", "own")._http
    assert str(given.base_url) == "http://127.0.0.1:9"
    assert given.headers["authorization"] == "Bearer own"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, BadRequest), (404, NotFound), (503, NotReady), (500, TrainerError)],
)
def test_a_refusal_is_the_error_that_the_server_raised(
    status: int, kind: type[TrainerError]
) -> None:
    told = {"error": {"message": "No", "hint": "Do this"}}
    error = _error(httpx.Response(status, json=told))
    assert (type(error), error.message, error.hint) == (kind, "No", "Do this")
