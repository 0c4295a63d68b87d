"""Validation: measures the policy on examples that it is not trained on."""

import logging
from datetime import UTC, datetime
from typing import Any

from trainer.harness.context import Context
from trainer.harness.metrics import reward_summary, write_jsonl
from trainer.harness.progress import EACH_EPOCH
from trainer.harness.runner import attempt, record
from trainer.measurements import measure

logger = logging.getLogger(__name__)


async def validate(context: Context, run_id: str, epoch: int) -> dict[str, Any]:
    """Run each validation example once, after `epoch` epochs, and return a summary."""
    assert context.validation is not None
    logger.info("Running validation after %s epochs", epoch, extra=EACH_EPOCH)
    context.progress.phase("validation", len(context.validation))
    label = f"{run_id}-validation-{epoch}"
    runs = await attempt(context.runner, context.validation, 1, label, context.progress.run_done)
    rows = [record(run) for run in runs]
    write_jsonl(context.config.eval.general.output_dir / f"validation_{epoch:04d}.jsonl", rows)
    # Optional: the TrainerAdapter may pass the runs on to the backend.
    if hasattr(context.trainer_adapter, "log_validation"):
        await context.trainer_adapter.log_validation(runs)
    measured = measure(rows)
    summary = {
        "epoch": epoch,
        "timestamp": datetime.now(UTC).isoformat(),
        **reward_summary(measured.rewards),
        "interval": measured.interval,
        "num_examples": len(measured.by_example),
        "failures": measured.lost,
        "metrics": measured.metrics,
    }
    if "avg_reward" in summary:
        reward = summary["avg_reward"]
        text = "Validation after %s epochs - Avg Reward: %.4f"
        logger.info(text, epoch, reward, extra=EACH_EPOCH)
    else:
        logger.warning("Validation after %s epochs produced no rewards", epoch)
    return summary
