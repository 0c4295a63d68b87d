"""Validation: measures the policy on examples that it is not trained on."""

import logging
from datetime import UTC, datetime
from typing import Any

from trainer.harness.context import Context
from trainer.harness.metrics import mean_metrics, reward_summary, write_jsonl
from trainer.harness.runner import failures, record, warn_of_failures

logger = logging.getLogger(__name__)


async def validate(context: Context, run_id: str, epoch: int) -> dict[str, Any]:
    """Run each validation example once, after `epoch` epochs, and return a summary."""
    assert context.validation is not None
    logger.info("Running validation after %s epochs", epoch)
    context.progress.phase("validation", len(context.validation))
    try:
        runs = await context.runner.run(
            context.validation, 1, f"{run_id}-validation-{epoch}", context.progress.run_done
        )
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    warn_of_failures(runs)
    all_runs = [run for group in runs for run in group]
    path = context.config.eval.general.output_dir / f"validation_{epoch:04d}.jsonl"
    write_jsonl(path, map(record, all_runs))
    # Optional: the TrainerAdapter may pass the runs on to the backend.
    if hasattr(context.trainer_adapter, "log_validation"):
        await context.trainer_adapter.log_validation(all_runs)
    summary = {
        "epoch": epoch,
        "timestamp": datetime.now(UTC).isoformat(),
        **reward_summary([run.reward for run in all_runs if run.reward is not None]),
        "num_examples": sum(run.reward is not None for run in all_runs),
        "failures": failures(runs),
        "metrics": mean_metrics(all_runs),
    }
    if "avg_reward" in summary:
        logger.info("Validation after %s epochs - Avg Reward: %.4f", epoch, summary["avg_reward"])
    else:
        logger.warning("Validation after %s epochs produced no rewards", epoch)
    return summary
