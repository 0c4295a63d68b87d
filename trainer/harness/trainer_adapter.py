"""`ARTTrainerAdapter`: takes trajectories to the backend, and sees the training through.

The backend may restart at any moment: a request that was cut off is sent again as it was, and
the backend, which journaled it, trains it once.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kit.types import Json
from trainer.client import ArtBackend, means
from trainer.errors import NotConnected, NotFound, NotReady, TrainerError
from trainer.harness import episodes
from trainer.harness.components import ArtBackendConfig, ArtTrainerAdapterConfig
from trainer.harness.types import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
    WorkflowRun,
)

logger = logging.getLogger(__name__)
BACKEND = "openpipe-art"


@dataclass(frozen=True)
class WireModel:
    """What ART's client calls a trainable model, as far as the control API needs it."""

    config: ArtBackendConfig
    inference_model_name: str = ""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def project(self) -> str:
        return self.config.project

    def safe_model_dump(self, mode: str = "json") -> Json:
        parts = ("init_args", "engine_args", "peft_args")
        given = {name: getattr(self.config, name) for name in parts}
        return {
            "name": self.name,
            "project": self.project,
            "base_model": self.config.base_model,
            "trainable": True,
            "_internal_config": {
                name: part.model_dump(mode=mode, exclude_none=True)
                for name, part in given.items()
                if part is not None
            },
        }


@dataclass(frozen=True)
class WireGroup:
    body: Json

    def model_dump(self, mode: str = "json") -> Json:
        return self.body


@dataclass
class _Job:
    ref: TrainingJobRef
    rows: list[dict[str, float]]
    """What the backend has told of its gradient steps so far."""
    task: "asyncio.Task[None]"


class ARTTrainerAdapter:
    """Submits to `trainer serve`. Made without work; `initialize` connects."""

    def __init__(self, config: ArtTrainerAdapterConfig) -> None:
        self.config = config
        self._model = WireModel(config.backend)
        self._client: ArtBackend | None = None
        self._jobs: dict[str, _Job] = {}

    async def initialize(self, config: Any = None) -> None:
        """Connect, register the model and load it; raises when the backend is not there."""
        backend = self.config.backend
        host = f"[{backend.ip}]" if ":" in backend.ip else backend.ip
        self._client = ArtBackend(
            f"http://{host}:{backend.port}", backend.api_key.get_secret_value()
        )
        given = "wait_for_backend" in self.config.model_fields_set
        await self._connect(patience=self.config.wait_for_backend if given else 5)
        step = await self.current_step()
        logger.info("Model `%s` of project `%s` is at step %s", backend.name, backend.project, step)

    async def close(self) -> None:
        """End the jobs that still run before the connection, which they would try to restore."""
        for job in self._jobs.values():
            await self.cancel(job.ref)
        if self._client:
            await self._client.close()

    async def current_step(self) -> int:
        """The step the backend serves now; one that restarts is waited for."""
        try:
            return await self._ready()._get_step(self._model)
        except TrainerError as exc:
            # One that has come again knows the model only once it is registered anew.
            if not (_is_away(exc) or isinstance(exc, NotFound | NotReady)):
                raise
        await self._connect(patience=self.config.wait_for_backend)
        return await self._ready()._get_step(self._model)

    async def log_validation(self, runs: Sequence[WorkflowRun]) -> None:
        """Give what was measured to the backend: it is its `val/reward`, also at W&B."""
        try:
            await self._ready()._log(self._model, [episodes.measured(run) for run in runs], "val")
        except TrainerError as exc:
            logger.warning("The backend does not keep the validation: %s", exc.message)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Check the episodes and start the training; returns at once."""
        for group in trajectories.trajectories:
            for trajectory in group:
                if not (trajectory.metadata or {}).get("recorded"):
                    for episode in (trajectory.episode, *trajectory.additional_episodes):
                        episodes.check_order(episode)
        step = await self.current_step()
        self._warn_of_no_rate(step)
        if self.config.backend.delete_old_checkpoints:
            await self._ready()._delete_checkpoint_files(self._model, [step])
        ref = TrainingJobRef(
            run_id=trajectories.run_id, backend=BACKEND, metadata={"step": step + 1}
        )
        groups = [
            WireGroup({"trajectories": [episodes.to_wire(t) for t in group], "exceptions": []})
            for group in trajectories.trajectories
        ]
        rows: list[dict[str, float]] = []
        task = asyncio.create_task(self._train(step + 1, rows, groups))
        self._jobs[trajectories.run_id] = _Job(ref, rows, task)
        logger.info(
            "Submitted %s trajectories in %s groups for training",
            trajectories.count,
            len(groups),
        )
        return ref

    def _warn_of_no_rate(self, step: int) -> None:
        training = self.config.training
        last = training.max_steps if training.lr_scheduler_type != "constant" else None
        if last is not None and step >= last:
            logger.warning(
                "Step %s trains at a learning rate of 0, as `max_steps` is %s: raise it, or give "
                "the model another name to begin anew",
                step + 1,
                last,
            )

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        job = self._jobs[ref.run_id]
        told: Json = {"step": (job.ref.metadata or {})["step"], "metrics": means(job.rows)}
        state, message, progress = TrainingStatusEnum.RUNNING, None, None
        if job.rows and (total := job.rows[-1].get("num_gradient_steps")):
            progress = 100 * len(job.rows) / total
        if job.task.cancelled():
            state = TrainingStatusEnum.CANCELED
        elif job.task.done():
            error = job.task.exception()
            state = TrainingStatusEnum.FAILED if error else TrainingStatusEnum.COMPLETED
            if error is not None:
                message = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
                told["hint"] = getattr(error, "hint", "")
            else:
                progress = 100.0
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=BACKEND,
            status=state,
            progress=progress,
            message=message,
            metadata=told,
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Until the job ends; it is not an error here that it failed.

        Every `poll_interval` seconds where it stands goes to the debug log.
        """
        task = self._jobs[ref.run_id].task
        while not (await asyncio.wait([task], timeout=poll_interval))[0]:
            progress = (await self.status(ref)).progress
            logger.debug("training %s: %s %%", ref.run_id, progress)
        status = await self.status(ref)
        if status.status == TrainingStatusEnum.COMPLETED:
            logger.info("Training %s completed successfully.", ref.run_id)
        return status

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop waiting for a job. A step that the backend has begun ends there: it is journaled."""
        job = self._jobs[ref.run_id]
        job.task.cancel()
        await asyncio.gather(job.task, return_exceptions=True)

    async def _train(
        self, step: int, rows: list[dict[str, float]], groups: list[WireGroup]
    ) -> None:
        settings = self.config.training.wire()
        while True:
            rows.clear()
            try:
                async for row in self._ready()._train_model(self._model, groups, {}, settings):
                    rows.append(row)
                return
            except TrainerError as exc:
                if not _is_away(exc):
                    raise
                logger.warning("The backend went away while it trained: %s", exc.message)
                # It takes the journaled request up by itself; the same body again only joins it.
                await self._connect(patience=self.config.wait_for_backend)
                if await self.current_step() >= step:
                    return  # only answers were lost; the same body would be another step

    async def _connect(self, *, patience: float) -> None:
        """Register and prepare, for as long as nobody answers and `patience` lasts."""
        client = self._ready()
        deadline = time.monotonic() + patience
        while True:
            try:
                await client.register(self._model)
                await client._prepare_backend_for_training(self._model, None)
                return
            except TrainerError as exc:
                if not _is_away(exc):
                    raise
                if time.monotonic() >= deadline:
                    raise NotConnected(exc.message) from exc
            await asyncio.sleep(0.5)

    def _ready(self) -> ArtBackend:
        if self._client is None:
            raise RuntimeError("initialize() comes first")
        return self._client


def _is_away(error: TrainerError) -> bool:
    """Whether nobody answered, rather than that the answer was no."""
    return isinstance(error.__cause__, httpx.TransportError)
