"""`trainer chat`: a conversation with a served model, over the OpenAI API."""

import json
from collections.abc import Iterable, Iterator

import httpx

from kit.types import Json
from trainer.errors import LlmRefused, LlmUnavailable

CONNECT_S = 10.0
ANSWER_S = 600.0


class Conversation:
    """Messages with one model. Each `say` streams an answer and keeps both messages."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._settings: Json = {"model": model, "stream": True}
        if max_tokens is not None:
            self._settings["max_tokens"] = max_tokens
        self.messages: list[Json] = [{"role": "system", "content": system}] if system else []
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        self._http = httpx.Client(headers=headers, timeout=timeout)

    def close(self) -> None:
        self._http.close()

    def is_starting(self) -> bool:
        """Whether the server answers, but is not yet ready to serve its models."""
        try:
            health = self._http.get(f"{self._url}/health", timeout=CONNECT_S).json()
        except (httpx.HTTPError, ValueError):  # `say` explains why, or it is a server of others
            return False
        return isinstance(health, dict) and health.get("status") == "starting"

    def say(self, text: str) -> Iterator[str]:
        """Send a message and yield the answer as it arrives.

        An answer that fails is taken back with its question, so that the next one can be asked.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {**self._settings, "messages": messages}
        answer = ""
        try:
            with self._http.stream(
                "POST", f"{self._url}/v1/chat/completions", json=body
            ) as response:
                if response.is_error:
                    raise _refused(response)
                for piece in _pieces(response.iter_lines()):
                    answer += piece
                    yield piece
        except httpx.HTTPError as error:
            raise LlmUnavailable(
                f"The server at `{self._url}` did not answer: {error or type(error).__name__}",
                hint="Start it with `trainer serve` or `launcher up`, or name it with `--url`",
            ) from error
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """The texts of a stream of events. An error inside the stream is raised."""
    for line in lines:
        event = line.removeprefix("data: ")
        if event == line or event == "[DONE]":
            continue
        try:
            chunk = json.loads(event)
        except ValueError as error:
            raise LlmRefused(
                f"The server sent an event that is not JSON: `{event[:80]}`"
            ) from error
        if problem := chunk.get("error"):
            raise LlmRefused(str(problem.get("message")), hint=str(problem.get("hint") or ""))
        for choice in chunk.get("choices") or []:
            yield (choice.get("delta") or {}).get("content") or ""


def _refused(response: httpx.Response) -> LlmRefused:
    response.read()
    try:
        error = response.json()["error"]
        return LlmRefused(str(error["message"]), hint=str(error.get("hint") or ""))
    except (ValueError, KeyError, TypeError):
        return LlmRefused(f"The server answered {response.status_code}: {response.text[:200]}")
