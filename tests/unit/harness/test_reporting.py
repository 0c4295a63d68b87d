"""Tracking services that fail."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.harness import reporting


class Unreachable:
    """A service that fails in every second call, and at the end."""

    def __init__(self, *_: object) -> None:
        self.calls = 0

    def log(self, epoch: int, numbers: Any) -> None:
        self.calls += 1
        if self.calls % 2:
            raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


def test_a_service_that_fails_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(reporting.REPORTERS, "mlflow", Unreachable)
    finetuning = SimpleNamespace(report_to=["mlflow"])
    context: Any = SimpleNamespace(config=SimpleNamespace(finetuning=finetuning))
    (reporter,) = reporting.load_reporters(context, "run")
    with caplog.at_level(logging.WARNING):
        for epoch in range(3):
            reporter.log(epoch, {"avg_reward": 1.0})
        reporter.close()
    message = "`mlflow` did not take the metrics: ConnectionError: no route to host"
    assert caplog.messages == [message] * 2  # a row of failures is one warning
