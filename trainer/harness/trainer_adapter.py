"""`ARTTrainerAdapter`: submits trajectories to the backend and waits for the training.

The backend may restart at any moment. An interrupted request is sent again unchanged, and the
backend trains it only once, because it keeps a journal. A job may be submitted while the one before
it trains: the backend trains it next, and from no other step.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kit.types import Json
from trainer.client import ArtBackend
from trainer.errors import Conflict, NotConnected, NotFound, NotReady, TrainerError
from trainer.harness import episodes
from trainer.harness.backend_config import ArtBackendConfig
from trainer.harness.components import ArtTrainerAdapterConfig
from trainer.harness.progress import EACH_EPOCH
from trainer.harness.training_job import BACKEND, Job
from trainer.harness.types import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
    WorkflowRun,
)

logger = logging.getLogger(__name__)
KEPT = 8  # jobs whose status can be asked for
AGAIN_S = 1.0  # until a job is sent again that arrived before the one that it follows


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


class ARTTrainerAdapter:
    """Submits trajectories to `trainer serve`. `initialize` connects to it."""

    def __init__(self, config: ArtTrainerAdapterConfig) -> None:
        self.config = config
        self._model = WireModel(config.backend)
        self._client: ArtBackend | None = None
        self._builder: Any = None
        self._jobs: dict[int, Job] = {}
        """The last jobs by their step, in order."""

    async def initialize(self, config: Any = None) -> None:
        """Connect, register the model and load it. Raise if the backend does not answer."""
        self._builder = getattr(config, "trajectory_builder", None)
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
            await job.cancel()
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

    async def newest_step(self) -> int:
        """Return the step that the next job is trained from, which may still train itself."""
        submitted = [step for step, job in self._jobs.items() if job.is_open]
        return max([await self.current_step(), *submitted])

    def model_at(self, step: int) -> str:
        """Return the name by which the backend samples from a step."""
        return f"{self._model.project}/{self._model.name}@{step}"

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
        step = await self.newest_step()
        self._warn_if_schedule_ended(step)
        if self.config.backend.delete_old_checkpoints:
            await self._delete_old_checkpoints(step)
        ref = TrainingJobRef(
            run_id=trajectories.run_id, backend=BACKEND, metadata={"step": step + 1}
        )
        groups = [WireGroup(group) for group in episodes.wire_groups(trajectories)]
        rows: list[dict[str, float]] = []
        before = self._jobs.get(step)
        if before and before.is_open:
            before.check()  # no `await` from here on
        else:
            before = None
        task = asyncio.create_task(self._train(step + 1, rows, groups, before))
        self._jobs[step + 1] = Job(step + 1, rows, task)
        for old in [old for old in self._jobs if old <= step + 1 - KEPT]:
            del self._jobs[old]
        logger.info(
            "Submitted %s trajectories in %s groups for training",
            trajectories.count,
            len(trajectories.trajectories),
            extra=EACH_EPOCH,
        )
        return ref

    async def _delete_old_checkpoints(self, step: int) -> None:
        try:
            kept = {step, *getattr(self._builder, "pinned_steps", ())}
            await self._ready()._delete_checkpoint_files(self._model, sorted(kept))
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
        return self._job(ref).status(ref)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait until the job ends and return its status, even if it failed.

        Progress goes to the debug log every `poll_interval` seconds.
        """
        job = self._job(ref)
        while not (await asyncio.wait([job.task], timeout=poll_interval))[0]:
            progress = (await self.status(ref)).progress
            logger.debug("training %s: %s %%", ref.run_id, progress)
        status = job.status(ref)
        if status.status == TrainingStatusEnum.COMPLETED:
            logger.info("Training %s completed successfully.", ref.run_id, extra=EACH_EPOCH)
        return status

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop waiting for a job. If the backend has started the step, it still finishes it."""
        await self._job(ref).cancel()

    def _job(self, ref: TrainingJobRef) -> Job:
        return self._jobs[(ref.metadata or {})["step"]]

    async def _train(
        self,
        step: int,
        rows: list[dict[str, float]],
        groups: list[WireGroup],
        before: Job | None,
    ) -> None:
        """Train the groups as `step`; not before the job `before`, nor in its place."""
        settings = self.config.training.wire()
        while True:
            rows.clear()
            follows = before is not None and not before.task.done()
            parent = step - 1 if follows else None
            try:
                if before:
                    before.check()
                async for row in self._ready()._train_model(
                    self._model, groups, {}, settings, parent_step=parent
                ):
                    rows.append(row)
                return
            except TrainerError as exc:
                if _is_unreachable(exc):
                    logger.warning(
                        "Lost the connection to the backend during training: %s", exc.message
                    )
                    # The backend resumes the journaled request itself. The same body joins it.
                    await self._connect(patience=self.config.wait_for_backend)
                elif before is None or parent is None:
                    raise
                elif isinstance(exc, Conflict):
                    # The job before has not arrived yet, or another client's step came between.
                    await asyncio.wait([before.task], timeout=AGAIN_S)
                    continue
                else:  # the backend stopped, or the job before failed and may succeed yet
                    await asyncio.wait([before.task])
                    before.check()
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
