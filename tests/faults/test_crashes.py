"""Random faults in server, engine and learner: killed or frozen at any moment of a step.

Each round trains one step. At its end the checkpoints are those of a run that nothing disturbed,
byte for byte: nothing was lost and nothing trained twice.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.patient import BASE, hashes, prepare, restart_if_dead, sample, train
from tests.processes import children
from tests.serving import Serving

ROUNDS = 4
WORKERS = {"engine": "trainer.engines", "learner": "trainer.learner"}
POINTS = {
    "server": ["server-journaled", "server-row", "server-trained", "server-advanced"],
    "learner": ["learner-begins", "learner-stepped", "checkpoint-written", "checkpoint-renamed"],
    "engine": ["engine-loaded"],
}


def victim_of(serving: Serving, name: str) -> int | None:
    """The process id of the server or one of its workers, if it runs."""
    if name == "server":
        return serving.process.pid
    with contextlib.suppress(OSError):  # the server died meanwhile
        for pid in children(serving.process.pid):
            if WORKERS[name] in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    return None


def send(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Fault:
    """What happens to whom, and when: drawn at random."""

    def __init__(self, chance: random.Random, usual_s: float) -> None:
        self.victim = chance.choice(["server", "engine", "learner"])
        self.how = chance.choice(["kill", "freeze", "freeze and kill", "kill at a point"])
        self.after_s = chance.uniform(0, 1.2 * usual_s)
        self.frozen_s = chance.uniform(0.1, 1.5)
        self.point = chance.choice(POINTS[self.victim])

    def __str__(self) -> str:
        if self.how == "kill at a point":
            return f"{self.victim} killed at {self.point}"
        frozen = f" for {self.frozen_s:.2f} s" if "freeze" in self.how else ""
        return f"{self.victim}: {self.how}{frozen} after {self.after_s:.2f} s"

    @contextmanager
    def happening(self, serving: Serving, faults: Path) -> Iterator[None]:
        """Let it happen while the body runs."""
        if self.how == "kill at a point":
            (faults / self.point).touch()
            yield
            return
        thread = threading.Thread(target=self._strike, args=(serving,))
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def _strike(self, serving: Serving) -> None:
        time.sleep(self.after_s)
        pid = victim_of(serving, self.victim)
        if "freeze" in self.how:
            send(pid, signal.SIGSTOP)
            time.sleep(self.frozen_s)
        send(pid, signal.SIGKILL if "kill" in self.how else signal.SIGCONT)


def test_random_faults_change_no_checkpoint(
    tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    calm = Serving(tmp_path / "calm", BASE)
    stormy = Serving(tmp_path / "stormy", BASE, ART_FAULTS=str(faults))
    with calm, stormy:
        usual_s = 1.0
        happened: Counter[str] = Counter()
        for step in range(1, ROUNDS * rounds + 1):
            began = time.monotonic()
            calm_rows = train(calm, step)
            if step > 1:  # the first also builds the optimizer
                usual_s = time.monotonic() - began
            fault = Fault(chance, usual_s)
            print(f"round {step}: {fault}", flush=True)  # noqa: T201
            with fault.happening(stormy, faults):
                rows = train(stormy, step)
            restart_if_dead(stormy)  # the fault may come after the answer
            for point in faults.iterdir():  # of a point that was not reached
                point.unlink()
            assert rows in (calm_rows, []), str(fault)
            assert prepare(stormy) == step, str(fault)
            assert hashes(stormy) == hashes(calm), str(fault)
            happened[f"{fault.victim}: {fault.how}"] += 1
        print(f"{ROUNDS * rounds} rounds: {dict(sorted(happened.items()))}")  # noqa: T201
        assert sample(stormy) == sample(calm) == ROUNDS * rounds
