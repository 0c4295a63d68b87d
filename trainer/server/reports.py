"""Reports the numbers of a step to the log, Prometheus, the run's history and W&B."""

import logging
import re
from collections import Counter

from kit.types import Json
from trainer import exact_tokens
from trainer.config import ServerConfig
from trainer.page.overview import PLANNED
from trainer.page.reader import finite
from trainer.server import history
from trainer.server.gpu_watch import GpuWatch
from trainer.server.journal import JournaledRequest
from trainer.server.matching import choices_of
from trainer.server.model import Model
from trainer.server.prometheus import Metrics
from trainer.server.recorder import Recorder
from trainer.server.wandb_reports import WandbReports

logger = logging.getLogger(__name__)

_COUNTED = {
    "art_retokenized_total": "data/retokenized",
    "art_exact_prompts_total": "data/exact_prompts",
    "art_rendered_prompts_total": "data/rendered_prompts",
    "art_ambiguous_choices_total": "data/ambiguous_choices",
}
MOST_REASONS = 8
"""Series of lost runs for each step at most; further reasons are counted together."""


class Reports:
    """Reports what happens to every step."""

    def __init__(self, config: ServerConfig, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        key = config.wandb_api_key
        self.metrics = Metrics()
        self.gpus = GpuWatch()
        self.wandb = WandbReports(key.get_secret_value() if key else None, config.state_path)

    def step_served(
        self,
        model: Model,
        request: JournaledRequest,
        rows: list[Json],
        times: dict[str, float],
    ) -> None:
        """Log and count a step, and append the means of its `rows` to the run's history."""
        seconds, step = times["time/step_s"], request.step
        logger.info("%s is at step %s after %.1f s", model.key, step, seconds)
        means = _means(rows)
        self.metrics.count("art_steps_total", model=model.key)
        for counter, name in _COUNTED.items():
            self.metrics.count(counter, means.get(name, 0))
        self.metrics.set("art_step", step, model=model.key)
        self.metrics.set("art_train_seconds", seconds, model=model.key)
        numbers = {**means, **times, **self.gpus.since_last(), **_about_groups(request)}
        self._record(model, step, numbers)
        if self.recorder:
            self.recorder.step_served(model.directory, request)

    async def written(self) -> None:
        """Wait until every step that was served is on disk."""
        if self.recorder:
            await self.recorder.written()

    def step_checked(self, model: Model, step: int, found: dict[str, float]) -> None:
        """Report how far engine and learner differ at a step."""
        difference = found["canary/logprob_difference"]
        self.metrics.set("art_canary_logprob_difference", difference, model=model.key)
        self._record(model, step, found)

    def step_failed(self, model: Model, error: Exception) -> None:
        logger.error("training %s failed: %s", model.key, error)
        self.metrics.count("art_failed_steps_total", model=model.key)

    def _record(self, model: Model, step: int, line: dict[str, float]) -> None:
        try:
            history.append(model.directory, {"step": step, **line})
        except OSError as error:  # the step is served all the same
            logger.error("step %s is not in the history: %s", step, error)
        self.wandb.send(model.project, model.name, step, line)


def _means(rows: list[Json]) -> dict[str, float]:
    """The mean of every metric over the rows that hold it."""
    return {
        name: sum(values) / len(values)
        for name in sorted({name for row in rows for name in row})
        if (values := [row[name] for row in rows if name in row])
    }


def _about_groups(request: JournaledRequest) -> dict[str, float]:
    choices = list(choices_of(request.groups))
    ids = [id for choice in choices if (id := exact_tokens.choice_id(choice))]
    numbers: dict[str, float] = {
        "data/step_num_truncated": sum(
            choice.get("finish_reason") == "length" for choice in choices
        ),
        "data/shared_choices": len(ids) - len(set(ids)),
    }
    rewards = [
        trajectory.get("reward", 0.0)
        for group in request.groups
        for trajectory in group.get("trajectories") or []
        if request.config.get("kind") != "sft"  # rewards mean nothing in supervised training
    ]
    if rewards:
        numbers["train/reward"] = sum(rewards) / len(rewards)
    if (planned := _steps_planned(request)) is not None:
        numbers[PLANNED] = planned
    return numbers | _lost_runs(request)


def _lost_runs(request: JournaledRequest) -> dict[str, float]:
    """Runs that a client sends as exceptions, counted by the name of the exception."""
    counts = Counter(
        _exception_name(fault)
        for group in request.groups
        for fault in group.get("exceptions") or []
    )
    shown = dict(counts.most_common(MOST_REASONS))
    if rest := counts.total() - sum(shown.values()):
        shown["other"] = shown.get("other", 0) + rest
    return {f"data/lost_{name}": float(count) for name, count in shown.items()}


def _exception_name(fault: object) -> str:
    """The last name in the type: ART sends `<class 'openai.APITimeoutError'>`."""
    kind = fault.get("type") if isinstance(fault, dict) else None
    names = re.findall(r"[A-Za-z_]\w*", str(kind or "")[:200], re.ASCII)
    return str(names[-1])[:60] if names else "unknown"


def _steps_planned(request: JournaledRequest) -> float | None:
    """How many steps the client will train, if a trajectory's metadata says it."""
    for group in request.groups:
        for trajectory in group.get("trajectories") or []:
            metadata = trajectory.get("metadata")
            found = finite(metadata.get(PLANNED)) if isinstance(metadata, dict) else None
            if found is not None:
                return found
    return None
