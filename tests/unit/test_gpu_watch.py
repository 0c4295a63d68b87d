"""Watching the GPUs: what a step reports, and what becomes of a driver that fails."""

import logging
import sys
import time
from types import SimpleNamespace

import pytest

from trainer.server import gpu_watch
from trainer.server.gpu_watch import GpuWatch

GIB = 1 << 30


def test_a_step_reports_the_mean_use_and_the_fullest_gpu_since_the_last_one() -> None:
    watch = GpuWatch(lambda: [])
    watch.note([(0.2, 3 * GIB), (0.4, 5 * GIB)])
    watch.note([(1.0, 4 * GIB), (0.8, 1 * GIB)])
    assert watch.since_last() == {"gpu/use": pytest.approx(0.6), "gpu/memory_gib": 5.0}
    assert watch.since_last() == {}


def test_a_driver_that_fails_ends_the_watch_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_watch, "INTERVAL", 0.001)
    readings = iter([[(0.5, float(GIB))]])
    watch = GpuWatch(lambda: next(readings))  # StopIteration, as any error of a library
    with caplog.at_level(logging.WARNING):
        watch.start()
        while not caplog.messages:
            time.sleep(0.001)
    assert "no longer watched" in caplog.text
    assert watch.since_last() == {"gpu/use": 0.5, "gpu/memory_gib": 1.0}


def test_without_a_gpu_or_nvml_nothing_is_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_watch, "visible_gpus", list)
    GpuWatch().start()
    assert caplog.messages == []
    monkeypatch.setattr(gpu_watch, "visible_gpus", lambda: ["0"])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO):
        assert GpuWatch().since_last() == {}
    assert "not measured" in caplog.text


def test_gpus_are_read_by_index_or_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: ("index", index),
        nvmlDeviceGetHandleByUUID=lambda uuid: ("uuid", uuid),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=50 if gpu[1] == 1 else 100),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=GIB),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_watch, "visible_gpus", lambda: ["1", "GPU-7"])
    read = gpu_watch._reader()
    assert read is not None
    assert read() == [(0.5, float(GIB)), (1.0, float(GIB))]
