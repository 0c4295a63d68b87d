"""`rollout` and `trajectory`: from the run of any agent to a trajectory with every turn.

An agent that uses the base URL `/rollouts/ID/v1` is recorded there, whatever its framework:

    async with rollout(model) as run:
        answer = await agent(base_url=run.base_url, api_key=run.api_key, model=run.model)
    trajectory = run.trajectory(reward=score(answer))
"""

import os
import uuid
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from kit.types import Json
from trainer.client.art_backend import error_of
from trainer.client.conversations import Turn, is_choice, join, turns_of
from trainer.errors import BadRequest, NotConnected, NotFound

# The start of the server's message for a rollout without calls.
NOTHING_SAMPLED = "Nothing was sampled in rollout"
_TIMEOUT = httpx.Timeout(60, connect=10)


class Rollout:
    """One run of an agent, recorded under a base URL of its own. A context manager, also async."""

    def __init__(self, id: str, model: str, server: str, api_key: str) -> None:
        self.id = id
        self.model = model
        """The model's name for the agent's client."""
        self.server = server
        """Address of the server, without `/v1`."""
        self.api_key = api_key
        """Key for the agent's client. Some clients require one, even if the server does not."""
        self.turns: list[Turn] = []
        """Every recorded choice, once the block has ended."""
        self._collected = False

    @property
    def base_url(self) -> str:
        """Base URL for clients of OpenAI's API. It ends with `/v1`."""
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """Base URL for clients of Anthropic's API, which add `/v1` themselves."""
        return f"{self.server}/rollouts/{quote(self.id, safe='')}"

    def trajectory(
        self,
        reward: float,
        *,
        metrics: Mapping[str, float | int | bool] | None = None,
        metadata: Mapping[str, str | float | int | bool | None] | None = None,
        as_json: bool = False,
    ) -> Any:
        """Return the trajectory of this run, with every choice that was sampled in it.

        It is an `art.Trajectory` if openpipe-art is installed, and otherwise (or with `as_json`)
        the same as JSON, which `/_train_model` accepts.
        """
        if not self._collected:
            self.collect()
        if not self.turns:
            raise NotFound(
                f"{NOTHING_SAMPLED} `{self.id}`",
                hint=f"Point the agent's client at `{self.base_url}`",
            )
        first, *more = join(self.turns)
        steps = [turn.choice["policy_step"] for turn in self.turns]
        wire = {
            **first.wire(),
            "additional_histories": [conversation.wire() for conversation in more],
            "reward": reward,
            "initial_policy_version": min(steps),
            "final_policy_version": max(steps),
            "metrics": dict(metrics or {}),
            "metadata": {"rollout": self.id, **(metadata or {})},
            "logs": [],
        }
        kind = None if as_json else _trajectory_class()
        return wire if kind is None else _as_art(kind, wire)

    def collect(self) -> None:
        """Read the choices recorded so far. The end of a `with` block does this."""
        with httpx.Client(timeout=_TIMEOUT) as http:
            try:
                self._read(http.get(self.anthropic_url, headers=self._headers()))
            except httpx.TransportError as exc:
                raise self._unreachable(exc) from exc

    async def collect_async(self) -> None:
        """Read the choices recorded so far. The end of an `async with` block does this."""
        async with httpx.AsyncClient(timeout=_TIMEOUT) as http:
            try:
                self._read(await http.get(self.anthropic_url, headers=self._headers()))
            except httpx.TransportError as exc:
                raise self._unreachable(exc) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # otherwise the agent's own error is raised
            self.collect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.collect_async()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def _read(self, response: httpx.Response) -> None:
        if response.status_code == 404 and NOTHING_SAMPLED in response.text:
            self.turns = []  # `trajectory` says so
        elif response.is_error:
            raise error_of(response)
        else:
            self.turns = turns_of(response.json()["completions"])
        self._collected = True

    def _unreachable(self, error: Exception) -> NotConnected:
        return NotConnected(
            f"Cannot reach the server at `{self.server}`: {error}",
            hint="Start it with `trainer serve`, or pass its `base_url`",
        )


def rollout(
    model: Any,
    *,
    id: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
) -> Rollout:
    """Begin a rollout of `model`: an `art.TrainableModel` or a name that the server serves.

    Use it as `async with rollout(model) as run:` or with a plain `with`. The defaults of
    `base_url` and `api_key` are the registered model's, then `OPENAI_BASE_URL` and `ART_API_KEY`,
    then the address of `trainer serve` on this machine.
    """
    name = model if isinstance(model, str) else model.get_inference_name()
    base_url = base_url or getattr(model, "inference_base_url", None)
    api_key = api_key or getattr(model, "inference_api_key", None)
    return Rollout(id or uuid.uuid4().hex, name, _server(base_url), _key(api_key))


def trajectory(
    rollout_id: str,
    reward: float,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    metrics: Mapping[str, float | int | bool] | None = None,
    metadata: Mapping[str, str | float | int | bool | None] | None = None,
    as_json: bool = False,
) -> Any:
    """Return a trajectory with every choice sampled under `/rollouts/ROLLOUT_ID/v1`.

    See `Rollout.trajectory`. If a request has `n` above 1, every choice is included.
    """
    run = Rollout(rollout_id, "", _server(base_url), _key(api_key))
    return run.trajectory(reward, metrics=metrics, metadata=metadata, as_json=as_json)


def _server(base_url: str | None) -> str:
    """Return the address of the server from the base URL that an agent's client would have."""
    base_url = base_url or os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1"
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequest(
            f"`base_url` is `{base_url}`", hint="Write it as `http://127.0.0.1:8000/v1`"
        )
    return base_url.partition("/rollouts/")[0].rstrip("/").removesuffix("/v1")


def _key(api_key: str | None) -> str:
    return api_key or os.environ.get("ART_API_KEY") or "default"


def _trajectory_class() -> Any | None:
    """Return `art.Trajectory`, or None without openpipe-art."""
    try:
        import art
    except ImportError:
        return None
    # Another package on PyPI is named `art` too, and has no trajectories.
    return getattr(art, "Trajectory", None)


def _as_art(kind: Any, wire: Json) -> Any:
    from openai.types.chat.chat_completion import Choice

    def typed(history: Json) -> Json:
        # ART tells choices from messages by their class, and converts neither.
        items = history["messages_and_choices"]
        choices = [Choice.model_validate(item) if is_choice(item) else item for item in items]
        return {**history, "messages_and_choices": choices}

    more = [typed(history) for history in wire["additional_histories"]]
    return kind.model_validate({**typed(wire), "additional_histories": more})
