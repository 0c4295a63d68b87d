"""`ARTTrainer`: the epoch loop. Each epoch samples, chooses groups, trains and records.

Where groups are sampled ahead, the next epoch is submitted while one trains, so that the backend
goes from step to step without a pause. Epochs still end, and are recorded, one after the other.
"""

import asyncio
import logging
import time
import uuid
from typing import IO, Any

from kit.types import Json
from trainer.errors import NothingToTrainOn
from trainer.harness import curriculum, history, plots
from trainer.harness.components import ArtTrainerConfig
from trainer.harness.context import Context
from trainer.harness.curriculum import CurriculumState
from trainer.harness.epoch import EpochUnderWay, sample_epoch, step_after, step_of
from trainer.harness.epoch_rules import (
    check_backend_step,
    check_early_stopping,
    check_for_runs,
    reason_to_stop,
    reasons_for_no_training,
    reward_row,
)
from trainer.harness.history import History, Pending
from trainer.harness.off_policy import OffPolicyBuilder
from trainer.harness.progress import EACH_EPOCH
from trainer.harness.reporting import Reporter, load_reporters
from trainer.harness.types import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from trainer.harness.validation import validate

logger = logging.getLogger(__name__)
DRAW_INTERVAL = 15.0  # seconds; a plot takes 0.25 s, which would slow down short epochs
MAX_IDLE_EPOCHS = 3  # a run that has never trained gives up after this many epochs


class ARTTrainer:
    """Runs epochs with validation, curriculum and resume. Call `initialize`, then `run`."""

    def __init__(self, config: ArtTrainerConfig | None = None) -> None:
        self.config = config
        self._context: Context | None = None
        self._history: History | None = None
        self._reporters: list[Reporter] = []
        self._interrupted: dict[int, Pending] = {}
        """Epochs that an earlier program sampled and did not finish, by their number."""
        self._under_way: dict[int, EpochUnderWay] = {}
        """The epochs that are sampled and have not ended, by their number."""
        self._ended = 0.0
        """When the last epoch ended, or the run began."""
        self._drawn = -DRAW_INTERVAL
        self._lock: IO[str] | None = None

    async def initialize(self, config: Context) -> None:
        """Initialize the components, and load an earlier run's history if resuming."""
        self._context = config
        plots.check_installed()
        rule = config.config.finetuning.early_stopping
        check_early_stopping(rule, validated=config.validation is not None)
        self._lock = history.lock(config.output_dir)
        past = history.resume(config.output_dir) if config.resume else None
        if past is None:
            if config.resume:
                logger.info("Nothing to resume in %s: starting at epoch 1", config.output_dir)
            if moved := history.set_aside(config.output_dir):
                logger.info("Moved the files of the previous run to %s", moved)
            run_id = f"art_run_{uuid.uuid4().hex[:8]}"
            past = History(config.output_dir, run_id)
            past.curriculum = curriculum.start(config.config.finetuning.curriculum_learning)
            past.save()  # so a run killed in its first epoch can be resumed
        self._history = past
        builder = config.trajectory_builder
        await builder.initialize(config)
        interrupted = past.interrupted()
        self._interrupted = {pending.epoch: pending for pending in interrupted}
        if isinstance(builder, OffPolicyBuilder):
            builder.resume(past.unused(interrupted), past.epoch, len(interrupted))
        await config.trainer_adapter.initialize(config)
        self._reporters = load_reporters(config, past.run_id)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train until `num_epochs` epochs are finished, counting those of a resumed run."""
        context, past = self._ready()
        statuses: list[TrainingJobStatus] = []
        context.progress.begin(num_epochs, past.epoch)
        following: asyncio.Task[TrainingJobRef | None] | None = None
        try:
            if past.epoch:
                logger.info("Resuming run %s after epoch %s", past.run_id, past.epoch)
                check_backend_step(await self._step(), past.metrics[-1].get("step"))
            else:
                await self._validate_alone(0)
            self._ended = time.monotonic()
            while past.epoch < num_epochs:
                ref = await (following or self.run_epoch(past.epoch, past.run_id))
                following = self._follow(num_epochs)
                status = await self._finish_epoch(ref, num_epochs)
                statuses.append(status)
                if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
                    logger.error("Training failed at epoch %s: %s", past.epoch + 1, status.message)
                    return statuses
                logger.info("Completed epoch %s/%s", past.epoch, num_epochs, extra=EACH_EPOCH)
                if past.idle >= MAX_IDLE_EPOCHS and not past.trained:
                    why = reasons_for_no_training(past.metrics[-1])
                    raise NothingToTrainOn(f"Nothing to train on in {past.idle} epochs: {why}")
                rule = context.config.finetuning.early_stopping
                if reason := reason_to_stop(rule, past.rewards, past.validation):
                    logger.info("Stopping after epoch %s: %s", past.epoch, reason)
                    break
                if isinstance(context.trajectory_builder, OffPolicyBuilder):
                    await context.trajectory_builder.epoch_ended()
            check_for_runs(past.metrics)
            await self._validate_alone(past.epoch)  # if it stopped early, or has fewer epochs now
            self._draw()
            return statuses
        finally:
            if following:  # what it has submitted is trained, and recorded on `--resume`
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Close the reporters and unlock the output directory."""
        for reporter in self._reporters:
            reporter.close()
        self._reporters = []
        if self._lock:
            self._lock.close()

    def _follow(self, num_epochs: int) -> "asyncio.Task[TrainingJobRef | None] | None":
        """Sample and submit the next epoch while this one trains, unless it decides about it."""
        context, past = self._ready()
        epoch = past.epoch + 1
        if (
            epoch == num_epochs
            or self._is_validated(epoch, num_epochs)
            or context.config.finetuning.early_stopping
            or not isinstance(context.trajectory_builder, OffPolicyBuilder)
            or not hasattr(context.trainer_adapter, "newest_step")
        ):
            return None
        return asyncio.create_task(self.run_epoch(epoch, past.run_id))

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Sample and submit epoch `epoch` (from 0). Return None if there is nothing to train on."""
        context, past = self._ready()
        logger.info("Starting epoch %s for run %s", epoch + 1, run_id, extra=EACH_EPOCH)
        started = time.monotonic()
        interrupted = self._interrupted.pop(epoch + 1, None)
        pending = interrupted or await self._sample(epoch, run_id)
        again = interrupted is not None
        trained = again and await self._was_trained(pending)
        self._under_way[epoch + 1] = EpochUnderWay(pending, started, time.monotonic(), again)
        if trained:
            logger.info("Epoch %s was trained before the restart", epoch + 1)
            step = None if pending.step is None else pending.step + 1
            metadata = {"trained": True, "step": step}
            return TrainingJobRef(run_id=run_id, backend="resumed", metadata=metadata)
        await asyncio.to_thread(past.begin_training, pending)
        if not pending.collection.trajectories:
            return None
        context.progress.training(None if pending.step is None else pending.step + 1)
        return await context.trainer_adapter.submit(pending.collection)

    async def _sample(self, epoch: int, run_id: str) -> Pending:
        started = time.monotonic()
        before = self._under_way.get(epoch)
        state = CurriculumState.from_json(before.pending.curriculum) if before else None
        context, past = self._ready()
        pending = await sample_epoch(context, epoch, run_id, state or past.curriculum)
        waited = time.monotonic() - max(started, self._ended)
        pending.row["time/sample_s"] = 0.0 if self._under_way else waited
        return pending

    async def _finish_epoch(self, ref: TrainingJobRef | None, num_epochs: int) -> TrainingJobStatus:
        """Wait for the training, validate if it is due, and record the epoch."""
        context, past = self._ready()
        under_way = self._under_way[past.epoch + 1]
        pending = under_way.pending
        status = await self._await_training(ref, past.run_id)
        if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
            return status
        if isinstance(context.trajectory_builder, OffPolicyBuilder):
            await context.trajectory_builder.policy.ask()  # runs that start in a validation need it
        metadata = status.metadata or {}
        row = {
            **pending.row,
            "step": step_after(under_way, metadata.get("step"), await self._step()),
            **(metadata.get("metrics") or {}),
            "time/train_s": time.monotonic() - max(under_way.sampled, self._ended),
        }
        trainable = row.get("data/step_num_groups_trainable", row["filtered_groups"])
        past.idle = 0 if trainable else past.idle + 1
        past.trained += bool(trainable)
        past.epoch += 1
        past.curriculum = CurriculumState.from_json(pending.curriculum)
        past.position = pending.position or past.position
        validation = None
        if self._is_validated(past.epoch, num_epochs):
            started = time.monotonic()
            validation = await self._validate(past.epoch)
            row["time/validate_s"] = time.monotonic() - started
        row["time/epoch_s"] = time.monotonic() - max(under_way.started, self._ended)
        self._ended = time.monotonic()
        past.metrics.append(row)
        past.rewards.append(reward_row(row))
        past.save()
        past.end_training()
        del self._under_way[past.epoch]
        if time.monotonic() - self._drawn > DRAW_INTERVAL:
            self._draw()
        self._report(row, validation)
        reward = row.get("avg_reward")
        logger.info(
            "Epoch %s progress logged - Avg Reward: %s, Trajectories: %s",
            past.epoch,
            "none" if reward is None else f"{reward:.4f}",
            row["num_trajectories"],
            extra=EACH_EPOCH,
        )
        context.progress.epoch_row(row, validation)
        context.progress.one_done(reward, (validation or {}).get("avg_reward"))
        return status

    async def _await_training(self, ref: TrainingJobRef | None, run_id: str) -> TrainingJobStatus:
        context, _ = self._ready()
        if ref is None or (ref.metadata or {}).get("trained"):
            return TrainingJobStatus(
                run_id=run_id,
                backend="openpipe-art",
                status=TrainingStatusEnum.COMPLETED,
                message="No trajectories to train on" if ref is None else "Already trained",
                metadata=None if ref is None else {"step": (ref.metadata or {})["step"]},
            )
        return await context.trainer_adapter.wait_until_complete(ref)

    def _is_validated(self, epoch: int, num_epochs: int) -> bool:
        """Whether a validation follows the epoch, numbered from 1."""
        context, _ = self._ready()
        due = epoch % context.validation_interval == 0 or epoch == num_epochs
        return context.validation is not None and due

    async def _validate(self, epoch: int) -> Json:
        context, past = self._ready()
        summary = await validate(context, past.run_id, epoch)
        past.validation.append(summary)
        return summary

    async def _validate_alone(self, epoch: int) -> None:
        """Validate outside of the epochs, unless that was measured already."""
        context, past = self._ready()
        measured = [summary["epoch"] for summary in past.validation]
        if context.validation is not None and epoch not in measured:
            summary = await self._validate(epoch)
            past.save()
            self._report({"epoch": epoch}, summary)
            context.progress.epoch_row({"epoch": epoch}, summary)

    async def _was_trained(self, pending: Pending) -> bool:
        """Whether the backend has finished the step of an interrupted epoch."""
        step = await self._step()
        if not self._under_way:  # otherwise the step that it is trained from may still train
            check_backend_step(step, pending.step)
        return step is not None and pending.step is not None and step > pending.step

    async def _step(self) -> int | None:
        return await step_of(self._ready()[0].trainer_adapter)

    def _draw(self) -> None:
        context, past = self._ready()
        self._drawn = time.monotonic()
        if not past.rewards:
            return
        enabled = context.config.finetuning.curriculum_learning.enabled
        plots.reward_plot(
            context.output_dir / history.PLOT, past.rewards, past.validation, curriculum=enabled
        )

    def _report(self, row: Json, validation: Json | None) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        numbers |= {f"metrics/{name}": value for name, value in row.get("metrics", {}).items()}
        if validation and "avg_reward" in validation:
            numbers["validation/avg_reward"] = validation["avg_reward"]
        for reporter in self._reporters:
            reporter.log(row["epoch"], numbers)

    def _ready(self) -> tuple[Context, History]:
        if self._context is None or self._history is None:
            raise RuntimeError("Call initialize() first")
        return self._context, self._history

    @property
    def history(self) -> Any:
        return self._ready()[1]
