"""What every test gets: an empty home, no credentials, and no silent skip in CI."""

import os
import signal
from collections.abc import Iterator

import pytest

_CREDENTIALS = (
    "ART_", "AWS_", "AZURE_", "BASE_MODEL", "GOOGLE_", "HF_", "LANGFUSE_", "LAUNCHER_",
    "OPENAI_", "OPENPIPE_", "WANDB_",
)  # fmt: skip
# In the background of a shell it is ignored, and so would be a tunnel that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads your keys or writes into your home."""
    for name in os.environ:
        if name.startswith(_CREDENTIALS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    # One cache of built-in models for the whole session: making them is not what is tested.
    monkeypatch.setenv("ART_CACHE", str(tmp_path_factory.getbasetemp() / "art-cache"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI a skipped test is a failure, unless it needs a GPU or a cloud account."""
    report = yield
    excused = any(item.iter_markers("gpu")) or any(item.iter_markers("cloud"))
    if os.environ.get("CI") and report.skipped and not excused and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
