"""One epoch until it is submitted: it samples groups, and the curriculum chooses among them."""

import logging
import random
from dataclasses import dataclass

from kit.types import Json
from trainer.harness import curriculum
from trainer.harness.context import Context
from trainer.harness.curriculum import CurriculumState
from trainer.harness.epoch_rules import epoch_metrics, groups_with_signal, tell_the_plan
from trainer.harness.history import Pending
from trainer.harness.off_policy import OffPolicyBuilder
from trainer.harness.types import TrainerAdapter, TrajectoryCollection

logger = logging.getLogger(__name__)


@dataclass
class EpochUnderWay:
    """An epoch that is sampled and has not ended, and when its sampling began and ended."""

    pending: Pending
    started: float
    sampled: float
    interrupted: bool = False
    """Whether an earlier program sampled it, and may have submitted it."""


async def sample_epoch(
    context: Context, epoch: int, run_id: str, state: CurriculumState
) -> Pending:
    """Sample epoch `epoch` (from 0); `state` is the curriculum's after the epoch before."""
    meta: Json = {"epoch": epoch, "run_id": run_id}
    builder = context.trajectory_builder
    await builder.start_run(run_id=run_id, meta=meta)
    sampled = await builder.finalize(run_id=run_id, meta=meta)
    if not sampled.trajectories:
        logger.warning("No trajectories collected for epoch %s", epoch + 1)
    chosen, state = _choose(context, sampled, epoch, state)
    step = await step_of(context.trainer_adapter, "newest_step")
    if step is not None:
        tell_the_plan(chosen, step + context.config.finetuning.num_epochs - epoch)
    ahead = builder if isinstance(builder, OffPolicyBuilder) else None
    row = {
        **epoch_metrics(epoch + 1, sampled, chosen, state.current_percentile),
        "failures": dict(getattr(builder, "lost", {})),
        "commonest_failure": getattr(builder, "commonest_failure", ""),
        "metrics": dict(getattr(builder, "metrics", {})),
        **(ahead.ages if ahead else {}),
    }
    return Pending(
        epoch=epoch + 1,
        step=step,
        row=row,
        collection=chosen,
        curriculum=state.as_json(),
        position=ahead.position if ahead else None,
    )


async def step_of(adapter: TrainerAdapter, which: str = "current_step") -> int | None:
    """Return the backend's `current_step` or `newest_step`, as far as the adapter has them."""
    ask = getattr(adapter, which, getattr(adapter, "current_step", None))
    return int(await ask()) if ask else None


def step_after(epoch: EpochUnderWay, told: int | None, served: int | None) -> int | None:
    """Return the step that an epoch ended with: what the adapter told, or else what was planned.

    It is no later than the step that is served. For an interrupted epoch only the plan counts: if
    its step was served just before it was submitted again, the adapter has counted one too many.
    """
    step = epoch.pending.step
    if step is not None and epoch.pending.collection.trajectories:
        step += 1
    if told is not None and not (epoch.interrupted and step is not None):
        step = told
    return min((known for known in (step, served) if known is not None), default=None)


def _choose(
    context: Context, sampled: TrajectoryCollection, epoch: int, state: CurriculumState
) -> tuple[TrajectoryCollection, CurriculumState]:
    """Return the groups that the curriculum selects, or none if none of them has a signal."""
    config = context.config.finetuning.curriculum_learning
    rng = random.Random(f"{context.config.finetuning.seed}/{epoch}")
    state = curriculum.expand(config, state, epoch)
    chosen, state = curriculum.select(config, state, sampled.rewards, rng)
    # The backend drops groups with equal rewards too, but counts and shows them.
    kept = [sampled.trajectories[index] for index in chosen]
    if sampled.trajectories and not groups_with_signal(kept):
        kept = []
        logger.warning(
            "Nothing to train on in epoch %s: in every group the rewards are equal, "
            "or differ by less than `min_reward_diff`",
            epoch + 1,
        )
    return sampled.model_copy(update={"trajectories": kept}), state
