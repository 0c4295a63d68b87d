"""The checks before every route."""

import json
from typing import Any

import pytest
from starlette.types import Message, Scope

from trainer.server.guard import MAX_DEPTH, Guard, too_deep


class Client:
    """Sends one request through a guard to an app that returns the body it received."""

    def __init__(self, **settings: Any) -> None:
        self._guard = Guard(self._app, **{"key": None, **settings})

    async def _app(self, scope: Scope, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def post(
        self, *chunks: bytes, path: str = "/register", **headers: str
    ) -> tuple[int, bytes]:
        waiting = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        waiting.append({"type": "http.request", "body": b"", "more_body": False})
        sent: list[Message] = []

        async def receive() -> Any:
            return waiting.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
        await self._guard(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def test_a_body_in_chunks_arrives_whole() -> None:
    assert await Client().post(b"[1,", b"2]") == (200, b"[1,2]")


@pytest.mark.parametrize("headers", [{}, {"content_length": "11"}, {"content_length": "many"}])
async def test_a_large_body_is_refused_with_and_without_its_length(headers: dict[str, str]) -> None:
    status, body = await Client(max_bytes=10).post(b"123456", b"78901", **headers)
    assert status == 413 and "larger than 10" in json.loads(body)["detail"]


async def test_a_deep_body_is_refused_before_it_is_parsed() -> None:
    status, body = await Client().post(b"[" * 100_000 + b"]" * 100_000)
    assert status == 400 and "nested deeper" in json.loads(body)["detail"]


@pytest.mark.parametrize(
    ("value", "deep"),
    [
        ([{"a": ["[" * 200, '"' * 9, "\\" * 7, '\\"[{']}] * 200, False),
        (json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH), False),
        (json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)), True),
        ({"a" * 9: json.loads('{"[": ' * MAX_DEPTH + "[]" + "}" * MAX_DEPTH)}, True),
    ],
)
def test_depth_counts_brackets_outside_strings_only(value: Any, deep: bool) -> None:
    assert too_deep(json.dumps(value).encode()) is deep


def test_a_truncated_body_is_not_deep() -> None:
    assert not too_deep(b"{") and not too_deep(b'{"a": [1, 2')


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/register", "Bearer secret", 200),
        ("/register", "Bearer other", 401),
        ("/register", "", 401),
        ("/register", "Bearer s\xe9cret", 401),
        ("/health", "", 200),
        ("/healthcheck", "", 200),
        ("/health/../register", "", 401),
    ],
)
async def test_every_route_except_health_needs_the_key(path: str, header: str, status: int) -> None:
    actual, _ = await Client(key="secret").post(b"", path=path, authorization=header)
    assert actual == status


async def test_the_key_may_come_in_the_header_that_anthropics_clients_send() -> None:
    for key, status in (("secret", 200), ("other", 401)):
        assert (await Client(key="secret").post(b"", x_api_key=key))[0] == status
