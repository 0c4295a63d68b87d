"""`ArtBackend`: an `art.Backend` for openpipe-art 0.5.18 that trains over HTTP.

That release has no client for the control API any more; this is it:

    backend = ArtBackend("http://127.0.0.1:7999")
    await model.register(backend)
    result = await backend.train(model, groups, learning_rate=1e-5)
"""

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx

from trainer.errors import BadRequest, TrainerError, Unsupported

# Training and loading take as long as they take; only a server that is not there is an error.
_TIMEOUT = httpx.Timeout(None, connect=10.0)

# Settings of a step that ART puts into its `config`; the other ones go into `dev_config`.
_TRAIN_CONFIG = {"learning_rate", "kl_penalty_coef", "grad_accumulation_sequences"}


class ArtBackend:
    """Trains models of openpipe-art on a `trainer serve`, reached at its control port."""

    def __init__(self, base_url: str = "http://127.0.0.1:7999", api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_TIMEOUT)
        self._steps: dict[tuple[str, str], int] = {}

    async def register(self, model: Any) -> None:
        await self._post("/register", _wire(model))

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body = {"model": _wire(model), "config": config}
        base_url, api_key = await self._post("/_prepare_backend_for_training", body)
        await self._get_step(model)
        return base_url, api_key

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """`NAME@STEP`. Without a step the newest one that this client has seen."""
        newest = self._steps.get((model.project, model.name), 0)
        return f"{model.name}@{newest if step is None else step}"

    async def _get_step(self, model: Any) -> int:
        step = int(await self._post("/_get_step", _wire(model)))
        self._steps[model.project, model.name] = step
        return step

    async def train(self, model: Any, trajectory_groups: Iterable[Any], **settings: Any) -> Any:
        """Train one step and return an `art.types.TrainResult`: the new step and mean metrics."""
        from art.types import TrainResult

        rows = [row async for row in self._train_rows(model, trajectory_groups, settings)]
        step = await self._get_step(model)
        # Without this the next rollouts would go on sampling the weights of the first step.
        model.inference_model_name = self._model_inference_name(model, step)
        names = {name for row in rows for name in row}
        means = {
            name: sum(values) / len(values)
            for name in sorted(names)
            if (values := [row[name] for row in rows if name in row])
        }
        return TrainResult(step=step, metrics=means)

    async def _train_rows(
        self, model: Any, trajectory_groups: Iterable[Any], settings: dict[str, Any]
    ) -> AsyncIterator[dict[str, float]]:
        given = {name: value for name, value in settings.items() if value is not None}
        verbose = bool(given.pop("verbose", False))
        body = {
            "model": _wire(model),
            "trajectory_groups": [group.model_dump(mode="json") for group in trajectory_groups],
            "config": {name: given.pop(name) for name in _TRAIN_CONFIG & given.keys()},
            "dev_config": given,
            "verbose": verbose,
        }
        async with self._http.stream("POST", "/_train_model", json=body) as response:
            if response.is_error:
                await response.aread()
                raise _error(response)
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line)

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        raise Unsupported("Deleting checkpoints is not supported by this server")

    def _train_sft(self, *arguments: Any, **settings: Any) -> AsyncIterator[dict[str, float]]:
        raise Unsupported("Supervised training is not supported by this server")

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: Any) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError as exc:
            raise TrainerError(
                f"Failed to connect to ART backend at `{self._http.base_url}`: {exc}",
                hint="Start it with `trainer serve`, or open `launcher tunnel`",
            ) from exc
        if response.is_error:
            raise _error(response)
        return response.json()


def _wire(model: Any) -> dict[str, Any]:
    return dict(model.safe_model_dump(mode="json"))


def _error(response: httpx.Response) -> TrainerError:
    try:
        error = response.json()["error"]
        return BadRequest(error["message"], hint=error["hint"])
    except (ValueError, KeyError, TypeError):
        return TrainerError(f"The server answered {response.status_code}: {response.text[:500]}")
