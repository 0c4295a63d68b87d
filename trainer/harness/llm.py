"""`Llm`: what a workflow speaks through, with an OpenAI base URL of its own rollout.

The gateway records what is said under that URL, so any framework may use it. A call through
`Llm.chat` is also noted here, for endpoints that record nothing.
"""

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from kit.types import Json
from trainer.errors import LlmRefused, LlmUnavailable
from trainer.harness.config import LlmConfig
from trainer.harness.types import Completion, Example

_NOTHING = "Nothing was sampled in rollout"  # how a gateway that records says so
FUNCTION_MARK = "~"  # between a rollout's id and the name of the part that calls


class Endpoint:
    """One LLM of the config: its connections, and whether it records rollouts."""

    def __init__(self, name: str, config: LlmConfig) -> None:
        self.name = name
        self.config = config
        self.records = False
        key = config.api_key.get_secret_value()
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(config.request_timeout, connect=10),
            # A pool that is too small would stall runs behind each other, not fail.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    @property
    def root(self) -> str:
        parts = urlsplit(self.config.base_url)
        return f"{parts.scheme}://{parts.netloc}"

    def url(self, rollout: str | None) -> str:
        """The base URL, of one rollout where the endpoint records them."""
        base = self.config.base_url.rstrip("/")
        if not self.records or rollout is None:
            return base
        path = urlsplit(base).path
        return f"{self.root}/rollouts/{quote(rollout, safe='')}{path}"

    async def probe(self) -> None:
        """Find out whether this is a gateway of ours, which records."""
        try:
            response = await self.http.get(f"{self.root}/rollouts/probe")
            self.records = _NOTHING in response.text
        except httpx.HTTPError:
            self.records = False

    async def recorded(self, rollout: str, function: str | None) -> list[Completion]:
        """What the gateway recorded under one rollout's URL."""
        if not self.records:
            return []
        try:
            response = await self._send("GET", f"{self.root}/rollouts/{quote(rollout, safe='')}")
        except LlmRefused as refused:
            if _NOTHING in refused.message:
                return []  # the workflow made no call through this handle
            raise
        return [
            Completion(
                llm=self.name,
                function=function,
                messages=said["messages"],
                choice=choice,
                tools=said["tools"],
                policy_step=said["policy_step"],
                created=said["created"],
            )
            for said in response["completions"]
            for choice in said["choices"][:1]
        ]

    async def chat(self, base_url: str, body: Json) -> Json:
        return await self._send("POST", f"{base_url}/chat/completions", body)

    async def _send(self, method: str, url: str, body: Json | None = None) -> Json:
        """One request, made again while the endpoint is away or overloaded."""
        problem = ""
        for attempt in range(self.config.max_retries + 1):
            if attempt:
                # Up to about 5 s: a server that restarts is back in less than all of them.
                await asyncio.sleep(min(5.0, 0.2 * 2**attempt) * random.uniform(0.5, 1))
            try:
                response = await self.http.request(method, url, json=body)
            except httpx.TimeoutException as exc:
                raise LlmUnavailable(f"LLM `{self.name}` did not answer in time") from exc
            except httpx.TransportError as exc:
                problem = f"LLM `{self.name}` cannot be reached at `{self.root}`: {exc}"
                continue
            if response.status_code in (429, 502, 503):
                problem = f"LLM `{self.name}` answered {response.status_code}"
                continue
            if response.is_error:
                raise LlmRefused(
                    f"LLM `{self.name}` answered {response.status_code}: {_say(response)}"
                )
            found: Json = response.json()
            return found
        raise LlmUnavailable(problem)


def _say(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


@dataclass
class _Rollout:
    """What all handles of one run share."""

    id: str
    endpoints: Mapping[str, Endpoint]
    noted: list[Completion] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    used: set[tuple[str, str | None]] = field(default_factory=set)
    """(LLM, function) of every handle that was handed out."""


class Llm:
    """A handle of one LLM for one run. `base_url`, `api_key` and `model` suit any OpenAI client."""

    def __init__(self, rollout: _Rollout, name: str, function: str | None = None) -> None:
        self._rollout = rollout
        self._endpoint = rollout.endpoints[name]
        self._function = function
        self.name = name
        rollout.used.add((name, function))

    @property
    def base_url(self) -> str:
        return self._endpoint.url(_rollout_id(self._rollout.id, self.name, self._function))

    @property
    def api_key(self) -> str:
        return self._endpoint.config.api_key.get_secret_value()

    @property
    def model(self) -> str:
        return self._endpoint.config.model_name

    @property
    def config(self) -> LlmConfig:
        return self._endpoint.config

    def named(self, function: str) -> "Llm":
        """The same LLM for a named part of the workflow, which `target_functions` can choose."""
        return Llm(self._rollout, self.name, function)

    def use(self, name: str) -> "Llm":
        """Another LLM of the config, in the same run."""
        return Llm(self._rollout, name, self._function)

    def reward(self, value: float) -> None:
        """Reward an intermediate step of this run, for the `intermediate_steps` evaluator."""
        self._rollout.rewards.append(float(value))

    async def chat(self, messages: list[Json], **settings: Any) -> Json:
        """One completion: OpenAI's message, with `content` and perhaps `tool_calls`."""
        body = {
            "model": self.model,
            "messages": messages,
            "logprobs": True,
            **self.config.sampling,
            **settings,
        }
        answer = await self._endpoint.chat(self.base_url, body)
        choice: Json = answer["choices"][0]
        self._rollout.noted.append(
            Completion(
                llm=self.name,
                function=self._function,
                messages=copy.deepcopy(messages),  # an agent goes on with its own list
                choice=choice,
                tools=settings.get("tools"),
                policy_step=answer.get("policy_step"),
                created=float(answer.get("created") or 0),
                recorded=False,
            )
        )
        message: Json = choice["message"]
        return message

    async def ask(self, question: str, **settings: Any) -> str:
        """The text of one answer to one question."""
        message = await self.chat([{"role": "user", "content": question}], **settings)
        return str(message.get("content") or "")


Workflow = Callable[[Example, Llm], Awaitable[Any]]
"""(example, llm) in, output out."""


def _rollout_id(rollout: str, llm: str, function: str | None) -> str:
    return FUNCTION_MARK.join((rollout, llm, function or ""))


class Llms:
    """All LLMs of a config."""

    def __init__(self, configs: Mapping[str, LlmConfig]) -> None:
        self.endpoints = {name: Endpoint(name, config) for name, config in configs.items()}

    async def probe(self) -> None:
        await asyncio.gather(*(endpoint.probe() for endpoint in self.endpoints.values()))

    def handle(self, rollout: str, name: str) -> Llm:
        return Llm(_Rollout(rollout, self.endpoints), name)

    async def completions(self, handle: Llm) -> list[Completion]:
        """Every call of the run, in its order: the gateway's record where there is one."""
        rollout = handle._rollout
        found: list[Completion] = []
        for name, function in sorted(rollout.used, key=str):
            endpoint = self.endpoints[name]
            if endpoint.records:
                id = _rollout_id(rollout.id, name, function)
                found += await endpoint.recorded(id, function)
            else:
                found += [c for c in rollout.noted if (c.llm, c.function) == (name, function)]
        return sorted(found, key=lambda completion: completion.created)

    def step_rewards(self, handle: Llm) -> list[float]:
        return list(handle._rollout.rewards)

    async def close(self) -> None:
        for endpoint in self.endpoints.values():
            await endpoint.http.aclose()
