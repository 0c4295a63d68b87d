"""`report_to`: sends metrics to tracking services, each through its own optional package.

Each service reads keys and addresses from its own environment variables. Only the services named
in the config receive anything.
"""

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from kit.errors import NotInstalled
from trainer.harness.context import Context
from trainer.harness.user_texts import error_text

logger = logging.getLogger(__name__)
Numbers = Mapping[str, float]


class Reporter(Protocol):
    """Sends an epoch's metrics to one service."""

    def log(self, epoch: int, numbers: Numbers) -> None: ...
    def close(self) -> None: ...


def load_reporters(context: Context, run_id: str) -> list[Reporter]:
    """Create a reporter for each name in `report_to`, or raise if its package is missing."""
    names = context.config.finetuning.report_to
    return [_Careful(name, REPORTERS[name](context, run_id)) for name in names]


class _Careful:
    """Warns where a service fails: an outage of it must not end a training."""

    def __init__(self, name: str, reporter: Reporter) -> None:
        self._name = name
        self._reporter = reporter
        self._failing = False

    def log(self, epoch: int, numbers: Numbers) -> None:
        self._attempt(partial(self._reporter.log, epoch, numbers))

    def close(self) -> None:
        self._attempt(self._reporter.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failing = False
        except Exception as error:  # of the service's own package
            if not self._failing:
                logger.warning("`%s` did not take the metrics: %s", self._name, error_text(error))
            self._failing = True


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise NotInstalled(
            f"`report_to: [{package}]` needs the package `{package}`: {exc}",
            hint=f"Install it with `pip install {package}`, or remove it from `report_to`",
        ) from exc


class WandbReporter:
    def __init__(self, context: Context, run_id: str) -> None:
        wandb = _import("wandb", "wandb")
        adapter = getattr(context.trainer_adapter, "config", None)
        project = getattr(getattr(adapter, "backend", None), "project", None)
        # With the same id, a resumed run continues the same W&B run.
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=run_id,
            resume="allow",
            dir=str(context.output_dir),
            config=context.config.model_dump(mode="json"),
        )

    def log(self, epoch: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=epoch)

    def close(self) -> None:
        self._run.finish()


class TensorboardReporter:
    def __init__(self, context: Context, run_id: str) -> None:
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        # TensorBoard's usual writer is part of torch, which the harness does not need.
        self._event = _import("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _import("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(context.output_dir / "tensorboard" / run_id))

    def log(self, epoch: int, numbers: Numbers) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
        ]
        event = self._event(wall_time=time.time(), step=epoch, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowReporter:
    def __init__(self, context: Context, run_id: str) -> None:
        self._mlflow = _import("mlflow", "mlflow")
        self._run = self._mlflow.start_run(run_name=run_id)

    def log(self, epoch: int, numbers: Numbers) -> None:
        self._mlflow.log_metrics(dict(numbers), step=epoch, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()


class LangfuseReporter:
    """Creates a trace per epoch, with one score per metric."""

    def __init__(self, context: Context, run_id: str) -> None:
        langfuse = _import("langfuse", "langfuse")
        self._client = langfuse.Langfuse()
        self._run_id = run_id

    def log(self, epoch: int, numbers: Numbers) -> None:
        trace = self._client.create_trace_id(seed=f"{self._run_id}/{epoch}")
        for name, value in numbers.items():
            self._client.create_score(
                trace_id=trace,
                name=name,
                value=float(value),
                data_type="NUMERIC",
                comment=f"{self._run_id}, epoch {epoch}",
            )

    def close(self) -> None:
        self._client.flush()
        self._client.shutdown()


class OpenpipeReporter:
    """Logs a request per epoch, with the metrics as its tags."""

    def __init__(self, context: Context, run_id: str) -> None:
        self._client = _import("openpipe.client", "openpipe").OpenPipe()
        self._run_id = run_id

    def log(self, epoch: int, numbers: Numbers) -> None:
        now = int(time.time() * 1000)
        self._client.report(
            requested_at=now,
            received_at=now,
            req_payload={"model": self._run_id, "messages": []},
            status_code=200,
            tags={
                "run_id": self._run_id,
                "epoch": str(epoch),
                **{name.replace("/", "."): f"{value:.6g}" for name, value in numbers.items()},
            },
        )

    def close(self) -> None:
        """Do nothing: `log` has sent every report."""


REPORTERS: dict[str, Callable[[Context, str], Reporter]] = {
    "wandb": WandbReporter,
    "tensorboard": TensorboardReporter,
    "mlflow": MlflowReporter,
    "langfuse": LangfuseReporter,
    "openpipe": OpenpipeReporter,
}
