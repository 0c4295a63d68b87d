"""Reports the numbers of a step to the log, Prometheus, the run's history and W&B."""

import logging

from kit.types import Json
from trainer.config import ServerConfig
from trainer.server import history
from trainer.server.journal import JournaledRequest
from trainer.server.matching import choices_of
from trainer.server.models import Model
from trainer.server.prometheus import Metrics
from trainer.server.wandb_reports import WandbReports

logger = logging.getLogger(__name__)

_COUNTED = {
    "art_retokenized_total": "data/retokenized",
    "art_exact_prompts_total": "data/exact_prompts",
    "art_rendered_prompts_total": "data/rendered_prompts",
    "art_ambiguous_choices_total": "data/ambiguous_choices",
}


class Reports:
    """Reports what happens to every step."""

    def __init__(self, config: ServerConfig) -> None:
        key = config.wandb_api_key
        self.metrics = Metrics()
        self.wandb = WandbReports(key.get_secret_value() if key else None, config.state_path)

    def step_served(
        self,
        model: Model,
        request: JournaledRequest,
        rows: list[Json],
        times: dict[str, float],
    ) -> None:
        """Log and count a step, and append the means of its `rows` to the run's history."""
        seconds = times["time/step_s"]
        logger.info("%s is at step %s after %.1f s", model.key, model.step, seconds)
        means = _means(rows)
        self.metrics.count("art_steps_total", model=model.key)
        for counter, name in _COUNTED.items():
            self.metrics.count(counter, means.get(name, 0))
        self.metrics.set("art_step", model.step, model=model.key)
        self.metrics.set("art_train_seconds", seconds, model=model.key)
        self._record(model, {**means, **times, **_about_groups(request)})

    def step_checked(self, model: Model, found: dict[str, float]) -> None:
        """Report how far engine and learner differ at the model's newest step."""
        difference = found["canary/logprob_difference"]
        self.metrics.set("art_canary_logprob_difference", difference, model=model.key)
        self._record(model, found)

    def step_failed(self, model: Model, error: Exception) -> None:
        logger.error("training %s failed: %s", model.key, error)
        self.metrics.count("art_failed_steps_total", model=model.key)

    def _record(self, model: Model, line: dict[str, float]) -> None:
        try:
            history.append(model.directory, {"step": model.step, **line})
        except OSError as error:  # the step is served all the same
            logger.error("step %s is not in the history: %s", model.step, error)
        self.wandb.send(model.project, model.name, model.step, line)


def _means(rows: list[Json]) -> dict[str, float]:
    """The mean of every metric over the rows that hold it."""
    return {
        name: sum(values) / len(values)
        for name in sorted({name for row in rows for name in row})
        if (values := [row[name] for row in rows if name in row])
    }


def _about_groups(request: JournaledRequest) -> dict[str, float]:
    numbers: dict[str, float] = {
        "data/step_num_truncated": sum(
            choice.get("finish_reason") == "length" for choice in choices_of(request.groups)
        )
    }
    rewards = [
        trajectory.get("reward", 0.0)
        for group in request.groups
        for trajectory in group.get("trajectories") or []
        if request.config.get("kind") != "sft"  # rewards mean nothing in supervised training
    ]
    if rewards:
        numbers["train/reward"] = sum(rewards) / len(rewards)
    return numbers
