"""What `--model` names: a step or the base model on the server, an LLM of the config, or a URL."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpx
from pydantic import SecretStr

from kit.errors import ConfigError
from trainer.errors import LlmRefused, LlmUnavailable, NotFound, UnknownModel
from trainer.harness.components import ArtTrainerAdapterConfig
from trainer.harness.config import FinetuneConfig, LlmConfig
from trainer.harness.trainer_adapter import ARTTrainerAdapter

BASE = "base"
STEP = re.compile(r"(?P<name>.+)@(?P<step>\d+)")
KEYS = ("EVAL_API_KEY", "OPENAI_API_KEY")
"""Variables that may hold the key of a URL, the first that is set."""
SHOWN = 12
"""How many names a hint lists."""


@dataclass(frozen=True)
class EvalModel:
    """A model to evaluate."""

    label: str
    """Its name in the results. A step is part of it, so it always means the same weights."""
    llm: LlmConfig
    """The endpoint that takes the place of the config's own."""


def target_llm(config: FinetuneConfig) -> str:
    """Name of the LLM that is trained, whose place the evaluated model takes."""
    name = config.finetuning.target_model or getattr(config.workflow, "llm", None)
    name = name or next(iter(config.llms), None)
    if name is None:
        raise ConfigError("The config has no `llms`", hint="Add at least one endpoint")
    return name


def adapter_of(config: FinetuneConfig) -> ArtTrainerAdapterConfig | None:
    """The config's backend, if it is one that we can ask to load a model."""
    found = config.trainer_adapters.get(config.finetuning.trainer_adapter or "")
    return found if isinstance(found, ArtTrainerAdapterConfig) else None


def default_models(config: FinetuneConfig) -> list[str]:
    """The base model and the newest step of the config's run, or the workflow's LLM."""
    if adapter := adapter_of(config):
        return [f"{adapter.backend.base_model}@{BASE}", adapter.backend.name]
    return [target_llm(config)]


async def find_models(config: FinetuneConfig, names: Sequence[str]) -> list[EvalModel]:
    """Resolve each name, and check that its endpoint answers and has the model."""
    models = [await _find(config, name) for name in names]
    labels = [model.label for model in models]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"The model `{label}` is given twice", hint="Give each `--model` once"
            )
    return models


async def _find(config: FinetuneConfig, name: str) -> EvalModel:
    trained = config.llms[target_llm(config)]
    if "://" in name:
        llm = _at_url(trained, name)
        served = await _served(llm, name)
        if served is not None and llm.model_name not in served:
            await _check_retrievable(llm, name, served)
        return EvalModel(name, llm)
    llm = config.llms.get(name) or trained.model_copy(update={"model_name": name})
    served = await _served(llm, name)
    if served is None:  # it does not list its models; its first answer will tell
        return EvalModel(name, llm)
    if not _is_served(llm.model_name, served) and await _load(config, llm.model_name):
        served = await _served(llm, name) or []
    pinned = _pin(llm.model_name, served, llm.base_url)
    label = pinned if name not in config.llms or pinned != llm.model_name else name
    return EvalModel(label, llm.model_copy(update={"model_name": pinned}))


def _at_url(trained: LlmConfig, name: str) -> LlmConfig:
    """The LLM of `URL#MODEL`, sampled with the settings of the config's own."""
    url, _, model = name.partition("#")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not model:
        raise ConfigError(
            f"`{name}` is not the URL of a model",
            hint="Write `URL#MODEL`, such as `http://127.0.0.1:8000/v1#my-model`",
        )
    if parts.username or parts.password:
        raise ConfigError(
            f"The URL of `{model}` at `{parts.hostname}` holds a user name or password",
            hint=f"Put the key in the variable {KEYS[0]}: results and logs show the URL",
        )
    key = next((value for variable in KEYS if (value := os.environ.get(variable))), "default")
    update = {"base_url": url, "model_name": model, "api_key": SecretStr(key)}
    return trained.model_copy(update=update)


async def _served(llm: LlmConfig, name: str) -> list[str] | None:
    """The models that an endpoint lists; None if it lists none."""
    answer = await _get(llm, "/models", name)
    if answer is None:
        return None
    try:
        return [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


async def _check_retrievable(llm: LlmConfig, name: str, served: Sequence[str]) -> None:
    """Some endpoints have names that they do not list."""
    if await _get(llm, f"/models/{quote(llm.model_name, safe='')}", name) is None:
        raise UnknownModel(
            f"There is no model `{llm.model_name}` at `{llm.base_url}`",
            hint=_listed("It serves", served),
        )


async def _get(llm: LlmConfig, path: str, name: str) -> httpx.Response | None:
    """The answer of an endpoint; None where it has nothing at this path."""
    key = llm.api_key.get_secret_value()
    url = llm.base_url.rstrip("/")
    try:
        async with httpx.AsyncClient(timeout=httpx.Timeout(30, connect=10)) as http:
            answer = await http.get(url + path, headers={"Authorization": f"Bearer {key}"})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LlmUnavailable(
            f"Cannot reach the endpoint `{url}` of `{name}`: {error or type(error).__name__}",
            hint="Check the address, and that the server runs: `trainer serve`",
        ) from error
    if answer.status_code in (401, 403):
        raise LlmRefused(
            f"The endpoint `{url}` of `{name}` refused the key ({answer.status_code})",
            hint=f"Set the variable {KEYS[0]} for a URL, or `api_key` in `llms`",
        )
    if answer.status_code >= 500:
        raise LlmUnavailable(
            f"The endpoint `{url}` of `{name}` answered {answer.status_code}",
            hint="Wait until it is ready, and try again",
        )
    return None if answer.is_error else answer


def _is_served(name: str, served: Sequence[str]) -> bool:
    return name in served or any(
        match["name"] == name for one in served if (match := STEP.fullmatch(one))
    )


async def _load(config: FinetuneConfig, name: str) -> bool:
    """Let the backend load the config's model: after a restart it serves none until asked."""
    adapter = adapter_of(config)
    if adapter is None:
        return False
    match = STEP.fullmatch(name)
    backend = adapter.backend
    if (match["name"] if match else name) not in (backend.name, f"{backend.base_model}@{BASE}"):
        return False
    connection = ARTTrainerAdapter(adapter)
    try:
        await connection.initialize()
    finally:
        await connection.close()
    return True


def _pin(name: str, served: Sequence[str], url: str) -> str:
    """Return a name that will mean the same weights tomorrow, or raise if it is not served."""
    steps = sorted(
        int(match["step"])
        for one in served
        if (match := STEP.fullmatch(one)) and match["name"] == name
    )
    if steps:
        return f"{name}@{steps[-1]}"
    if name in served:
        if f"{name}@{BASE}" in served:
            raise ConfigError(
                f"`{name}` at `{url}` stands for whichever model was trained last",
                hint=f"Write `{name}@{BASE}` for the untrained model, or `NAME@STEP`",
            )
        return name
    match = STEP.fullmatch(name)
    steps = sorted(
        int(other["step"])
        for one in served
        if match and (other := STEP.fullmatch(one)) and other["name"] == match["name"]
    )
    if match and steps:
        raise NotFound(
            f"`{match['name']}` has no step {match['step']} at `{url}`",
            hint=_listed("Its steps", [str(step) for step in steps]),
        )
    raise UnknownModel(f"There is no model `{name}` at `{url}`", hint=_listed("It serves", served))


def _listed(what: str, names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[-SHOWN:]]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what}: {', '.join(shown)}{more}" if names else f"{what} nothing yet"
