"""Console output: log lines as in NVIDIA's guide, and on a terminal a live bar below them."""

import logging
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from trainer.harness.types import WorkflowRun


class Progress:
    """A bar with reward, trajectories per second and time left. Hidden without a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._epochs = self._bar.add_task("epochs", total=None, status="")
        self._runs = self._bar.add_task("runs", total=None, status="", visible=False)
        self._started = time.monotonic()
        self._phase_started = self._started
        self._done = self._finished = self._total = 0
        self._reward = "reward -"

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, total: int, done: int) -> None:
        """Start with `done` of `total` epochs finished by earlier programs."""
        self._total, self._finished, self._done = total, done, 0
        self._started = time.monotonic()
        self._bar.update(self._epochs, total=total, completed=done)

    def phase(self, name: str, total: int) -> None:
        """Start a phase of `total` workflow runs."""
        self._phase_started = time.monotonic()
        self._bar.reset(self._runs, total=total, description=name, visible=True)

    def run_done(self, _: WorkflowRun) -> None:
        self._bar.advance(self._runs)
        task = self._bar.tasks[self._runs]
        rate = task.completed / max(time.monotonic() - self._phase_started, 1e-6)
        self._bar.update(self._runs, status=f"{rate:.1f} trajectories/s")

    def training(self, step: int | None) -> None:
        self._bar.reset(self._runs, total=None, description="training", visible=True)
        self._bar.update(self._runs, status="" if step is None else f"step {step}")

    def epoch_done(self, reward: float | None, validation: float | None) -> None:
        self._done += 1
        if reward is not None:
            self._reward = f"reward {reward:.3f}"
        if validation is not None:
            self._reward += f", validation {validation:.3f}"
        seconds = (time.monotonic() - self._started) / self._done
        left = seconds * (self._total - self._finished - self._done)
        status = f"{self._reward}, {int(left // 60)}:{int(left % 60):02d} left"
        self._bar.update(self._epochs, completed=self._finished + self._done, status=status)


class ConsoleLines(logging.Handler):
    """Prints `INFO - …` lines, above the bar if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname} - {record.getMessage()}"
        # soft_wrap keeps each message on one line when the output is piped.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
