"""Events of vLLM's streams, whatever text is in them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.engines.vllm_process import VllmProcess

TEXTS = ["plain", "a\u2028b", "a\u2029\u0085b", "é\x0b\x1c", "🙂"]


class InPieces:
    """A client whose streams arrive in pieces of three bytes."""

    status = 200

    def __init__(self, body: bytes) -> None:
        self._body = body

    @asynccontextmanager
    async def stream(self, *_: Any) -> AsyncIterator["InPieces"]:
        yield self

    async def parts(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 3):
            yield self._body[at : at + 3]


async def test_line_ends_inside_a_text_do_not_cut_an_event(tmp_path: Path) -> None:
    events = [f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in TEXTS]
    body = "".join([*events, "data: [DONE]\n\n"]).encode()
    process = VllmProcess([], log=tmp_path / "log")
    running: Any = SimpleNamespace(returncode=None)
    process._process = running
    client: Any = InPieces(body)
    process._client = client
    found = [event async for event in process.stream("/v1/completions", {})]
    assert [event["text"] for event in found] == TEXTS
