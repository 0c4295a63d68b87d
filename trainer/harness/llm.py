"""`Llm`: a workflow's access to a model, with an OpenAI base URL for each run.

The gateway records every call to that URL, so any framework can use it. For endpoints that record
nothing, `Llm.chat` keeps its own record.
"""

import asyncio
import copy
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from kit.http_client import ConnectionFailed, HttpClient, Response, ResponseTimeout
from kit.types import Json
from trainer.client.rollouts import NOTHING_SAMPLED
from trainer.errors import LlmRefused, LlmUnavailable
from trainer.harness.config import LlmConfig
from trainer.harness.types import Completion, Example
from trainer.processes import large_json

# With these waits, the default of `max_retries` lasts longer than the harness waits for a backend
# that stops answering (`wait_for_backend`): a run outlives a restart that the training outlives.
LONGEST_WAIT_S = 8.0
JITTER = (0.75, 1.0)
CONNECT_S = 10.0
FIRST_RETRIES = 8  # half a minute: an endpoint that never answered may have a wrong address
FUNCTION_MARK = "~"  # separates the rollout's id, the LLM's name and the function's name


class Endpoint:
    """The endpoint of one configured LLM."""

    def __init__(self, name: str, config: LlmConfig) -> None:
        self.name = name
        self.config = config
        self.records = False
        """Whether the endpoint is our gateway, which records rollouts. `probe` finds out."""
        self.reached = False
        """Whether the endpoint has ever answered. Then it is worth waiting for if it goes away."""
        self.ask_for_logprobs = True
        """Whether `Llm.chat` asks for logprobs. Training needs them; some endpoints refuse them."""
        key = config.api_key.get_secret_value()
        self.http = HttpClient(
            headers={"Authorization": f"Bearer {key}"},
            connect_timeout=CONNECT_S,
            read_timeout=config.request_timeout,
        )

    @property
    def root(self) -> str:
        parts = urlsplit(self.config.base_url)
        return f"{parts.scheme}://{parts.netloc}"

    def url(self, rollout: str | None) -> str:
        """Return the base URL: the rollout's own if the endpoint records rollouts."""
        base = self.config.base_url.rstrip("/")
        if not self.records or rollout is None:
            return base
        path = urlsplit(base).path
        return f"{self.root}/rollouts/{quote(rollout, safe='')}{path}"

    async def probe(self) -> None:
        """Find out whether the endpoint records rollouts."""
        try:
            response = await self.http.request("GET", f"{self.root}/rollouts/probe")
            self.reached = True
            self.records = NOTHING_SAMPLED in response.text
        except (ConnectionFailed, ResponseTimeout):
            self.records = False

    async def recorded(self, rollout: str, function: str | None) -> list[Completion]:
        """Return the calls that the gateway recorded for one rollout."""
        if not self.records:
            return []
        try:
            url = f"{self.root}/rollouts/{quote(rollout, safe='')}?only=completions"
            response = await self._send("GET", url)
        except LlmRefused as refused:
            if NOTHING_SAMPLED in refused.message:
                return []
            raise
        return [
            Completion(
                llm=self.name,
                function=function,
                messages=call["messages"],
                choice=choice,
                tools=call["tools"],
                policy_step=call["policy_step"],
                created=call["created"],
                prompt_tokens=_prompt_tokens(call),
            )
            for call in response["completions"]
            for choice in call["choices"]
        ]

    async def chat(self, base_url: str, body: Json) -> Json:
        return await self._send("POST", f"{base_url}/chat/completions", body)

    async def _send(self, method: str, url: str, body: Json | None = None) -> Json:
        """Send one request, with retries while the endpoint is unreachable or overloaded."""
        problem, attempt = "", -1
        while (attempt := attempt + 1) <= self._retries:
            if attempt:
                wait = min(LONGEST_WAIT_S, 0.2 * 2**attempt)
                await asyncio.sleep(wait * random.uniform(*JITTER))
            try:
                response = await self.http.request(method, url, body)
            except ResponseTimeout as exc:
                raise LlmUnavailable(
                    f"LLM `{self.name}` did not answer within {self.config.request_timeout:g} s"
                ) from exc
            except ConnectionFailed as exc:
                problem = f"Cannot reach LLM `{self.name}` at `{self.root}`: {exc}"
                continue
            self.reached = True
            if response.status in (429, 502, 503):
                problem = f"LLM `{self.name}` answered {response.status}"
                continue
            if response.status >= 300:  # a redirect is not followed: it would become a GET
                raise LlmRefused(
                    f"LLM `{self.name}` answered {response.status}: {_error_text(response)}"
                )
            try:
                answer: Json = large_json.parse(response.content)
            except ValueError as exc:
                raise LlmRefused(
                    f"LLM `{self.name}` answered without JSON: {response.text[:300]}",
                    hint="Check `base_url` in `llms`: it ends in `/v1` at most endpoints",
                ) from exc
            return answer
        raise LlmUnavailable(problem)

    @property
    def _retries(self) -> int:
        given = "max_retries" in self.config.model_fields_set
        return self.config.max_retries if self.reached or given else FIRST_RETRIES


def _prompt_tokens(answer: Json) -> int:
    count = (answer.get("usage") or {}).get("prompt_tokens")
    return count if isinstance(count, int) else 0


def _error_text(response: Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


@dataclass
class _Rollout:
    """State shared by all handles of one run."""

    id: str
    endpoints: Mapping[str, Endpoint]
    completions: list[Completion] = field(default_factory=list)
    """Calls through `Llm.chat`."""
    rewards: list[float] = field(default_factory=list)
    models: Mapping[str, str] = field(default_factory=dict)
    """Names of models that this run uses instead of those in the config, by LLM."""
    used: set[tuple[str, str | None]] = field(default_factory=set)
    """(LLM, function) of every handle created in this run."""


class Llm:
    """One LLM for one run. Any OpenAI client can use its `base_url`, `api_key` and `model`."""

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
        config = self._endpoint.config
        return self._rollout.models.get(self.name, config.model_name)

    @property
    def config(self) -> LlmConfig:
        return self._endpoint.config

    def named(self, function: str) -> "Llm":
        """Return this LLM for a named part of the workflow, for use in `target_functions`."""
        return Llm(self._rollout, self.name, function)

    def use(self, name: str) -> "Llm":
        """Return another configured LLM, in the same run."""
        return Llm(self._rollout, name, self._function)

    def reward(self, value: float) -> None:
        """Reward an intermediate step of this run, for the `intermediate_steps` evaluator."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"a reward must be a finite number, not `{number}`")
        self._rollout.rewards.append(number)

    async def chat(self, messages: list[Json], **settings: Any) -> Json:
        """Request a completion; return its first message, with `content` or `tool_calls`.

        `logprobs=None` leaves the field out, for endpoints that refuse it.
        """
        # Our gateway records the logprobs itself, and is asked for them once.
        records = self._endpoint.records
        body = {
            "model": self.model,
            "messages": messages,
            **({"logprobs": not records} if records or self._endpoint.ask_for_logprobs else {}),
            **self.config.sampling,
            **settings,
        }
        if body.get("logprobs", False) is None:
            del body["logprobs"]
        answer = await self._endpoint.chat(self.base_url, body)
        self._rollout.completions += [
            Completion(
                llm=self.name,
                function=self._function,
                messages=copy.deepcopy(messages),  # the agent may extend its list
                choice=choice,
                tools=settings.get("tools"),
                policy_step=answer.get("policy_step"),
                created=float(answer.get("created") or 0),
                recorded=False,
                prompt_tokens=_prompt_tokens(answer),
            )
            for choice in answer["choices"]
        ]
        message: Json = answer["choices"][0]["message"]
        return message

    async def ask(self, question: str, **settings: Any) -> str:
        """Send one question and return the text of the answer."""
        message = await self.chat([{"role": "user", "content": question}], **settings)
        return str(message.get("content") or "")


Workflow = Callable[[Example, Llm], Awaitable[Any]]
"""`workflow(example, llm)` returns the output of one run."""


def _rollout_id(rollout: str, llm: str, function: str | None) -> str:
    return FUNCTION_MARK.join((rollout, llm, function or ""))


class Llms:
    """All configured LLMs."""

    def __init__(self, configs: Mapping[str, LlmConfig]) -> None:
        self.endpoints = {name: Endpoint(name, config) for name, config in configs.items()}

    async def probe(self) -> None:
        await asyncio.gather(*(endpoint.probe() for endpoint in self.endpoints.values()))

    def handle(self, rollout: str, name: str, models: Mapping[str, str] | None = None) -> Llm:
        """Return a run's LLM. `models` names other models than those in the config, by LLM."""
        return Llm(_Rollout(rollout, self.endpoints, models=models or {}), name)

    async def completions(self, handle: Llm) -> list[Completion]:
        """Return all calls of the run in order, from the gateway's record if there is one."""
        rollout = handle._rollout
        completions: list[Completion] = []
        for name, function in sorted(rollout.used, key=str):
            endpoint = self.endpoints[name]
            if endpoint.records:
                id = _rollout_id(rollout.id, name, function)
                completions += await endpoint.recorded(id, function)
            else:
                completions += [
                    c for c in rollout.completions if (c.llm, c.function) == (name, function)
                ]
        return sorted(completions, key=lambda completion: completion.created)

    def step_rewards(self, handle: Llm) -> list[float]:
        return list(handle._rollout.rewards)

    async def close(self) -> None:
        for endpoint in self.endpoints.values():
            await endpoint.http.aclose()
