"""`ArtBackend`: an `art.Backend` for openpipe-art 0.5.18 and later that trains over HTTP.

These releases have no client for the control API. This module provides one:

    backend = ArtBackend("http://127.0.0.1:7999")  # or `ART_BASE_URL`
    await model.register(backend)
    result = await backend.train(model, groups, learning_rate=1e-5)
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx

from kit import json_text
from kit.types import Json
from trainer.errors import BadRequest, Conflict, NotFound, NotReady, TrainerError

logger = logging.getLogger(__name__)

# Training and loading may take any time; only a server that does not answer is an error.
_TIMEOUT = httpx.Timeout(None, connect=10.0)

# The step that a lease around a call pins, by project and run. ART has such a variable too, but
# not in a place that all its releases share and that can be imported without torch.
_leased: contextvars.ContextVar[dict[tuple[str, str], int]] = contextvars.ContextVar("_leased")


class ArtBackend:
    """Train models of openpipe-art with `trainer serve`, through its control port."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """The defaults are `ART_BASE_URL` and `ART_API_KEY`, which `launcher run` sets."""
        base_url = base_url or os.environ.get("ART_BASE_URL") or "http://127.0.0.1:7999"
        api_key = api_key or os.environ.get("ART_API_KEY")
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
        """Return `RUN@STEP`. The default is the leased step, or the newest that was seen."""
        run = _run(model)
        if step is None:
            step = _leased.get({}).get((model.project, run))
        newest = self._steps.get((model.project, run), 0)
        return f"{run}@{newest if step is None else step}"

    async def _get_step(self, model: Any) -> int:
        step = int(await self._post("/_get_step", _wire(model)))
        self._steps[model.project, _run(model)] = step
        return step

    @contextlib.asynccontextmanager
    async def exact_adapter_lease(self, model: Any, step: int) -> AsyncIterator[None]:
        """Sample from `step` inside the block, and keep its checkpoint until the block ends.

        Raises NotFound if the server has no such checkpoint.
        """
        body = {"model": _wire(model), "step": step}
        lease = await self._post("/_lease_checkpoint", body)
        renewal = asyncio.create_task(self._renew({**body, **lease}))
        token = _leased.set({**_leased.get({}), (model.project, _run(model)): step})
        try:
            yield
        finally:
            _leased.reset(token)
            renewal.cancel()
            with contextlib.suppress(TrainerError):  # the lease ends by itself
                await self._post("/_release_checkpoint", {**body, **lease})

    adapter_lease = exact_adapter_lease

    async def _renew(self, lease: Json) -> None:
        while True:
            await asyncio.sleep(lease["seconds"] / 3)
            try:
                await self._post("/_lease_checkpoint", lease)
            except TrainerError as error:  # the next attempt may succeed in time
                logger.warning("the lease of step %s was not renewed: %s", lease["step"], error)

    def supports_automatic_train_step_metrics(self) -> bool:
        """Have ART add `time/step_wall_s` to the metrics of each logged step."""
        return True

    async def train(self, model: Any, trajectory_groups: Iterable[Any], **settings: Any) -> Any:
        """Train one step and return an `art.types.TrainResult`: the new step and mean metrics.

        `settings` are those of ART's `LocalBackend.train`, and all fields of `GrpoConfig`. The
        server rejects a setting that it does not support, by name.
        """
        from art.types import TrainResult

        groups = list(trajectory_groups)
        verbose = bool(settings.pop("verbose", False))
        rows = [row async for row in self._train_model(model, groups, {}, settings, verbose)]
        step = await self._use_newest_step(model)
        return TrainResult(step=step, metrics=means(rows))

    def _train_model(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
        parent_step: int | None = None,
    ) -> AsyncIterator[dict[str, float]]:
        """Yield the rows of one step. `model.train` of openpipe-art up to 0.5.17 calls this.

        With `parent_step`, the server raises Conflict if another step is the newest by then, served
        or under way.
        """
        body = {
            "model": _wire(model),
            "trajectory_groups": [group.model_dump(mode="json") for group in trajectory_groups],
            "config": _plain(config),
            "dev_config": _settings(_plain(dev_config)),
            "verbose": verbose,
        }
        query = "" if parent_step is None else f"?parent_step={parent_step}"
        return self._rows(f"/_train_model{query}", body)

    async def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """Train one step on the assistant turns of `trajectories`; yield a row per batch."""
        settings = {**_plain(config), **_plain(dev_config)}
        settings.pop("metric_logging", None)  # it concerns backends that log in ART's place
        body = {
            "model": _wire(model),
            "trajectories": [trajectory.model_dump(mode="json") for trajectory in trajectories],
            "config": settings,
            "verbose": verbose,
        }
        async for row in self._rows("/_train_sft", body):
            yield row
        await self._use_newest_step(model)

    async def _log(self, model: Any, trajectory_groups: list[Json], split: str) -> None:
        """Have the server record groups and their averages under the model's step."""
        body = {"model": _wire(model), "trajectory_groups": trajectory_groups, "split": split}
        await self._post("/_log", body)

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        body = {"model": _wire(model), "steps_to_keep": list(steps_to_keep)}
        await self._post("/_delete_checkpoint_files", body)

    async def close(self) -> None:
        await self._http.aclose()

    async def _use_newest_step(self, model: Any) -> int:
        """Make the model sample from its newest weights, and return their step."""
        step = await self._get_step(model)
        model.inference_model_name = self._model_inference_name(model, step)
        return step

    async def _rows(self, path: str, body: Json) -> AsyncIterator[dict[str, float]]:
        try:
            content, kind = json_text.dump(body), {"content-type": "application/json"}
            async with self._http.stream("POST", path, content=content, headers=kind) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response)
                async for line in response.aiter_lines():
                    if line:
                        yield json.loads(line)
        except httpx.ConnectError as exc:
            raise self._unreachable(exc) from exc
        except httpx.TransportError as exc:
            raise TrainerError(
                f"The connection broke during the step: {str(exc) or type(exc).__name__}",
                hint="See the server's log, and train again",
            ) from exc

    async def _post(self, path: str, body: Any) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError as exc:
            raise self._unreachable(exc) from exc
        if response.is_error:
            raise error_of(response)
        return response.json()

    def _unreachable(self, error: Exception) -> TrainerError:
        return TrainerError(
            f"Failed to connect to ART backend at `{self._http.base_url}`: {error}",
            hint="Start it with `trainer serve`, or open `launcher tunnel`",
        )


def _wire(model: Any) -> Json:
    return dict(model.safe_model_dump(mode="json"))


def _run(model: Any) -> str:
    """Return the name under which the run is stored; before 0.5.19 a model has one name."""
    return str(getattr(model, "run_name", None) or model.name)


def _plain(config: Any) -> Json:
    """Return a config of ART's (a model, a dict or None) as a dict without nulls."""
    values = config.model_dump(mode="json") if hasattr(config, "model_dump") else config or {}
    return {name: value for name, value in values.items() if value is not None}


def _settings(arguments: Json) -> Json:
    """Translate arguments of ART's `train` to JSON; the server translates their names."""
    settings = dict(arguments)
    if "adam_params" in settings:
        settings["adam_params"] = _plain(settings["adam_params"])  # an object in Tinker
    return settings


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    names = sorted({name for row in rows for name in row})
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(each) / len(each) for name, each in values.items()}


def error_of(response: httpx.Response) -> TrainerError:
    kinds = {404: NotFound, 409: Conflict, 503: NotReady}
    other = BadRequest if response.is_client_error else TrainerError
    try:
        error = response.json()["error"]
        return kinds.get(response.status_code, other)(error["message"], hint=error["hint"])
    except (ValueError, KeyError, TypeError):
        return TrainerError(f"The server returned {response.status_code}: {response.text[:500]}")
