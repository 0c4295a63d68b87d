"""`ARTTrainer`: the epoch loop. Each epoch samples, chooses groups, trains and records."""

import asyncio
import logging
import random
import time
import uuid
from typing import IO, Any

from kit.types import Json
from trainer.errors import NothingToTrainOn
from trainer.harness import curriculum, history, plots
from trainer.harness.components import ArtTrainerConfig
from trainer.harness.context import Context
from trainer.harness.curriculum import CurriculumState
from trainer.harness.epoch_rules import (
    check_backend_step,
    check_early_stopping,
    check_for_runs,
    epoch_metrics,
    groups_with_signal,
    reason_to_stop,
    reasons_for_no_training,
    reward_row,
    tell_the_plan,
)
from trainer.harness.history import History, Pending
from trainer.harness.off_policy import OffPolicyBuilder
from trainer.harness.progress import EACH_EPOCH
from trainer.harness.reporting import Reporter, load_reporters
from trainer.harness.types import (
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
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
        self._pending: Pending
        self._epoch_started = self._train_started = 0.0
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
        if isinstance(builder, OffPolicyBuilder):
            builder.resume(past.unused(), past.epoch)
        await config.trainer_adapter.initialize(config)
        self._reporters = load_reporters(config, past.run_id)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train until `num_epochs` epochs are finished, counting those of a resumed run."""
        context, past = self._ready()
        statuses: list[TrainingJobStatus] = []
        context.progress.begin(num_epochs, past.epoch)
        try:
            if past.epoch:
                logger.info("Resuming run %s after epoch %s", past.run_id, past.epoch)
                check_backend_step(await self._step(), past.metrics[-1].get("step"))
            else:
                await self._validate_alone(0)
            while past.epoch < num_epochs:
                ref = await self.run_epoch(past.epoch, past.run_id)
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
            check_for_runs(past.metrics)
            await self._validate_alone(past.epoch)  # if it stopped early, or has fewer epochs now
            self._draw()
            return statuses
        finally:
            self.close()

    def close(self) -> None:
        """Close the reporters and unlock the output directory."""
        for reporter in self._reporters:
            reporter.close()
        self._reporters = []
        if self._lock:
            self._lock.close()

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Sample and submit epoch `epoch` (from 0). Return None if there is nothing to train on."""
        context, past = self._ready()
        logger.info("Starting epoch %s for run %s", epoch + 1, run_id, extra=EACH_EPOCH)
        self._epoch_started = time.monotonic()
        interrupted = past.pending()
        self._pending = pending = interrupted or await self._sample(epoch, run_id)
        past.curriculum = CurriculumState.from_json(pending.curriculum)
        past.position = pending.position or past.position
        self._train_started = time.monotonic()
        if interrupted and await self._was_trained(interrupted):
            logger.info("Epoch %s was trained before the restart", epoch + 1)
            return TrainingJobRef(run_id=run_id, backend="resumed", metadata={"trained": True})
        await asyncio.to_thread(past.begin_training, pending)
        if not pending.collection.trajectories:
            return None
        context.progress.training(None if pending.step is None else pending.step + 1)
        return await context.trainer_adapter.submit(pending.collection)

    async def _sample(self, epoch: int, run_id: str) -> Pending:
        """Sample the epoch's trajectories and choose the groups to train on."""
        context, past = self._ready()
        started = time.monotonic()
        meta: Json = {"epoch": epoch, "run_id": run_id}
        builder = context.trajectory_builder
        await builder.start_run(run_id=run_id, meta=meta)
        sampled = await builder.finalize(run_id=run_id, meta=meta)
        ahead = builder if isinstance(builder, OffPolicyBuilder) else None
        if not sampled.trajectories:
            logger.warning("No trajectories collected for epoch %s", epoch + 1)
        chosen = self._choose(sampled, epoch)
        step = await self._step()
        if step is not None:
            tell_the_plan(chosen, step + context.config.finetuning.num_epochs - epoch)
        row = {
            **epoch_metrics(epoch + 1, sampled, chosen, past.curriculum.current_percentile),
            "failures": dict(getattr(builder, "lost", {})),
            "commonest_failure": getattr(builder, "commonest_failure", ""),
            "metrics": dict(getattr(builder, "metrics", {})),
            **(ahead.ages if ahead else {}),
            "time/sample_s": time.monotonic() - started,
        }
        return Pending(
            epoch=epoch + 1,
            step=step,
            row=row,
            collection=chosen,
            curriculum=past.curriculum.as_json(),
            position=ahead.position if ahead else None,
        )

    def _choose(self, sampled: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        """Return the groups that the curriculum selects, or none if none of them has a signal."""
        context, past = self._ready()
        config = context.config.finetuning.curriculum_learning
        rng = random.Random(f"{context.config.finetuning.seed}/{epoch}")
        state = curriculum.expand(config, past.curriculum, epoch)
        chosen, past.curriculum = curriculum.select(config, state, sampled.rewards, rng)
        # The backend drops groups with equal rewards too, but counts and shows them.
        kept = [sampled.trajectories[index] for index in chosen]
        if sampled.trajectories and not groups_with_signal(kept):
            kept = []
            logger.warning(
                "Nothing to train on in epoch %s: in every group the rewards are equal, "
                "or differ by less than `min_reward_diff`",
                epoch + 1,
            )
        return sampled.model_copy(update={"trajectories": kept})

    async def _finish_epoch(self, ref: TrainingJobRef | None, num_epochs: int) -> TrainingJobStatus:
        """Wait for the training, validate if it is due, and record the epoch."""
        context, past = self._ready()
        pending = self._pending
        status = await self._await_training(ref, past.run_id)
        if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
            return status
        metadata = status.metadata or {}
        row = {
            **pending.row,
            "step": await self._step(),
            **(metadata.get("metrics") or {}),
            "time/train_s": time.monotonic() - self._train_started,
        }
        trainable = row.get("data/step_num_groups_trainable", row["filtered_groups"])
        past.idle = 0 if trainable else past.idle + 1
        past.trained += bool(trainable)
        past.epoch += 1
        validation = None
        if context.validation is not None and (
            past.epoch % context.validation_interval == 0 or past.epoch == num_epochs
        ):
            started = time.monotonic()
            validation = await self._validate(past.epoch)
            row["time/validate_s"] = time.monotonic() - started
        row["time/epoch_s"] = time.monotonic() - self._epoch_started
        past.metrics.append(row)
        past.rewards.append(reward_row(row))
        past.save()
        past.end_training()
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
            )
        return await context.trainer_adapter.wait_until_complete(ref)

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
        check_backend_step(step, pending.step)
        return step is not None and pending.step is not None and step > pending.step

    async def _step(self) -> int | None:
        current_step = getattr(self._ready()[0].trainer_adapter, "current_step", None)
        return int(await current_step()) if current_step else None

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
