"""`ARTTrainerAdapter`: submits trajectories to the backend and waits for the training.

The backend may restart at any moment. An interrupted request is sent again unchanged, and the
backend trains it only once, because it keeps a journal.
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
from trainer.errors import Conflict, NotConnected, NotFound, NotReady, TrainerError
from trainer.harness import episodes
from trainer.harness.backend_config import ArtBackendConfig
from trainer.harness.components import ArtTrainerAdapterConfig
from trainer.harness.progress import EACH_EPOCH
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
    """The parts of ART's trainable model that the control API needs."""

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
    """A group of trajectories as JSON, with the one method of ART's class that is needed."""

    body: Json

    def model_dump(self, mode: str = "json") -> Json:
        return self.body


@dataclass
class _Job:
    ref: TrainingJobRef
    rows: list[dict[str, float]]
    """Metrics of the gradient steps so far."""
    task: "asyncio.Task[None]"


class ARTTrainerAdapter:
    """Submits trajectories to `trainer serve`. `initialize` connects to it."""

    def __init__(self, config: ArtTrainerAdapterConfig) -> None:
        self.config = config
        self._model = WireModel(config.backend)
        self._client: ArtBackend | None = None
        self._jobs: dict[str, _Job] = {}

    async def initialize(self, config: Any = None) -> None:
        """Connect, register the model and load it. Raise if the backend does not answer."""
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
        """Cancel running jobs, which would try to reconnect, then close the connection."""
        for job in self._jobs.values():
            await self.cancel(job.ref)
        if self._client:
            await self._client.close()

    async def current_step(self) -> int:
        """Return the step that the backend serves. If it is restarting, wait for it."""
        try:
            return await self._ready()._get_step(self._model)
        except TrainerError as exc:
            # After a restart, the backend does not know the model until it is registered again.
            if not (_is_unreachable(exc) or isinstance(exc, NotFound | NotReady)):
                raise
        await self._connect(patience=self.config.wait_for_backend)
        return await self._ready()._get_step(self._model)

    async def log_validation(self, runs: Sequence[WorkflowRun]) -> None:
        """Send validation runs to the backend, which logs them as `val/reward`, also to W&B."""
        try:
            await self._ready()._log(
                self._model, [episodes.validation_group(run) for run in runs], "val"
            )
        except TrainerError as exc:
            logger.warning("The backend did not record the validation: %s", exc.message)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Check the episodes, start the training and return without waiting for it."""
        for group in trajectories.trajectories:
            for trajectory in group:
                if not (trajectory.metadata or {}).get("recorded"):
                    for episode in (trajectory.episode, *trajectory.additional_episodes):
                        episodes.check_order(episode)
        step = await self.current_step()
        self._warn_if_schedule_ended(step)
        if self.config.backend.delete_old_checkpoints:
            await self._delete_old_checkpoints(step)
        ref = TrainingJobRef(
            run_id=trajectories.run_id, backend=BACKEND, metadata={"step": step + 1}
        )
        groups = [WireGroup(group) for group in episodes.wire_groups(trajectories)]
        rows: list[dict[str, float]] = []
        task = asyncio.create_task(self._train(step + 1, rows, groups))
        self._jobs[trajectories.run_id] = _Job(ref, rows, task)
        logger.info(
            "Submitted %s trajectories in %s groups for training",
            trajectories.count,
            len(trajectories.trajectories),
            extra=EACH_EPOCH,
        )
        return ref

    async def _delete_old_checkpoints(self, step: int) -> None:
        try:
            await self._ready()._delete_checkpoint_files(self._model, [step])
        except Conflict as error:  # this very step trains: an earlier program has submitted it
            logger.info("Old checkpoints are deleted before the next step: %s", error.message)

    def _warn_if_schedule_ended(self, step: int) -> None:
        training = self.config.training
        last = training.max_steps if training.lr_scheduler_type != "constant" else None
        if last is not None and step >= last:
            logger.warning(
                "Step %s trains with a learning rate of 0, because `max_steps` is %s: raise it, or "
                "give the model another name to start a new run",
                step + 1,
                last,
            )

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        job = self._jobs[ref.run_id]
        metadata: Json = {"step": (job.ref.metadata or {})["step"], "metrics": means(job.rows)}
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
                metadata["hint"] = getattr(error, "hint", "")
            else:
                progress = 100.0
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=BACKEND,
            status=state,
            progress=progress,
            message=message,
            metadata=metadata,
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait until the job ends and return its status, even if it failed.

        Progress goes to the debug log every `poll_interval` seconds.
        """
        task = self._jobs[ref.run_id].task
        while not (await asyncio.wait([task], timeout=poll_interval))[0]:
            progress = (await self.status(ref)).progress
            logger.debug("training %s: %s %%", ref.run_id, progress)
        status = await self.status(ref)
        if status.status == TrainingStatusEnum.COMPLETED:
            logger.info("Training %s completed successfully.", ref.run_id, extra=EACH_EPOCH)
        return status

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop waiting for a job. If the backend has started the step, it still finishes it."""
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
                if not _is_unreachable(exc):
                    raise
                logger.warning(
                    "Lost the connection to the backend during training: %s", exc.message
                )
                # The backend resumes the journaled request itself. The same body joins it.
                await self._connect(patience=self.config.wait_for_backend)
                if await self.current_step() >= step:
                    return  # the step is finished; sending the body again would train another

    async def _connect(self, *, patience: float) -> None:
        """Register and prepare the model, retrying for `patience` seconds if nothing answers."""
        client = self._ready()
        deadline = time.monotonic() + patience
        while True:
            try:
                await client.register(self._model)
                await client._prepare_backend_for_training(self._model, None)
                return
            except TrainerError as exc:
                if not _is_unreachable(exc):
                    raise
                if time.monotonic() >= deadline:
                    raise NotConnected(exc.message) from exc
            await asyncio.sleep(0.5)

    def _ready(self) -> ArtBackend:
        if self._client is None:
            raise RuntimeError("Call initialize() first")
        return self._client


def _is_unreachable(error: TrainerError) -> bool:
    """Whether the backend did not answer, rather than answer with an error."""
    return isinstance(error.__cause__, httpx.TransportError)
