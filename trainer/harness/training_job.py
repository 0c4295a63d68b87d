"""`Job`: one submitted step, from its submission until its status was told."""

import asyncio
from dataclasses import dataclass

from kit.types import Json
from trainer.client import means
from trainer.errors import TrainerError
from trainer.harness.types import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum

BACKEND = "openpipe-art"


@dataclass
class Job:
    """A step that the backend trains, or will train after the one before it."""

    step: int
    rows: list[dict[str, float]]
    """Metrics of the gradient steps so far."""
    task: "asyncio.Task[None]"
    told: bool = False
    """Whether the caller knows how the job ended."""

    @property
    def failure(self) -> str:
        """Why the job has failed; empty if it has not."""
        if not self.task.done():
            return ""
        if self.task.cancelled():
            return "it was cancelled"
        error = self.task.exception()
        return "" if error is None else _message(error)

    @property
    def is_open(self) -> bool:
        """Whether no other job may take its place: it trains, or the caller is to know it failed.

        A step that was trained is not counted on: the backend may return from an older checkpoint.
        """
        return not self.task.done() or (bool(self.failure) and not self.told)

    def check(self) -> None:
        """Raise if the job has failed: no later one may take its place unnoticed."""
        if failure := self.failure:
            raise TrainerError(
                f"Step {self.step + 1} was not trained, because step {self.step} failed: {failure}",
                hint="Continue with `trainer finetune --resume`",
            )

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.told = True

    def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        self.told = self.task.done()
        metadata: Json = {"step": self.step, "metrics": means(self.rows)}
        state, message, progress = TrainingStatusEnum.RUNNING, None, None
        if self.rows and (total := self.rows[-1].get("num_gradient_steps")):
            progress = 100 * len(self.rows) / total
        if self.task.cancelled():
            state = TrainingStatusEnum.CANCELED
        elif self.task.done():
            error = self.task.exception()
            state = TrainingStatusEnum.FAILED if error else TrainingStatusEnum.COMPLETED
            if error is not None:
                message = _message(error)
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


def _message(error: BaseException) -> str:
    return getattr(error, "message", None) or f"{type(error).__name__}: {error}"
