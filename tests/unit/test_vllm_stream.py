"""Events of vLLM's streams, whatever text is in them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from kit.http_clients import HttpClients
from trainer.engines.vllm_process import VllmProcess

TEXTS = ["plain", "a\u2028b", "a\u2029\u0085b", "é\x0b\x1c", "🙂"]


class InPieces(httpx.AsyncByteStream):
    """A body that arrives in pieces of three bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 3):
            yield self._body[at : at + 3]


async def test_line_ends_inside_a_text_do_not_cut_an_event(tmp_path: Path) -> None:
    events = [f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in TEXTS]
    body = "".join([*events, "data: [DONE]\n\n"]).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=InPieces(body)))
    process = VllmProcess([], log=tmp_path / "log")
    running: Any = SimpleNamespace(returncode=None)
    process._process = running
    process._client = HttpClients(
        lambda: httpx.AsyncClient(transport=transport, base_url="http://vllm")
    )
    found = [event async for event in process.stream("/v1/completions", {})]
    assert [event["text"] for event in found] == TEXTS
