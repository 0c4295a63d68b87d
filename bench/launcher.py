"""Compares the launcher with plain SkyPilot, ssh and rsync, on the tests' Slurm cluster.

    python bench/launcher.py [--rounds 3] [--write]

Needs root, because it starts and stops `tests/lab/slurm.sh`. Goals: `up` takes at most 3 s longer
than `sky launch`; a second `sync`, with one changed file of 10,000, takes at most 1.5 times as long
as plain rsync; `pull` of 1 GB has at least 90% of plain rsync's speed; a log line appears within
2 s.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Table, machine, write_report  # noqa: E402

LAB = Path("/tmp/art-slurm-lab")
CLONE = LAB / "home/artdev/art-cluster"
PORTS = 17899, 17900
# Answers `/health` on both ports at once, so that only the launch is timed. Like all our tasks it
# has an `autostop`, which costs SkyPilot one more request.
TASK = f"""
name: bench
workdir: bench-work
resources: {{cpus: 4, memory: 4, autostop: {{idle_minutes: 5, wait_for: jobs, down: true}}}}
setup: 'true'
run: |
  python3 -m http.server --bind 127.0.0.1 {PORTS[0]} &
  exec python3 -m http.server --bind 127.0.0.1 {PORTS[1]}
"""
CHECKPOINT = """
import os, pathlib
from kit.manifest import write_manifest
path = pathlib.Path(".art/bench/models/m/checkpoints/0001")
path.mkdir(parents=True, exist_ok=True)
for part in range(4):
    (path / f"part-{part}").write_bytes(os.urandom(1 << 20) * 250)
write_manifest(path, {"step": 1})
"""
TICK = "for i in $(seq 12); do date +%s.%N; sleep 1; done"


def laptop(command: str) -> str:
    done = subprocess.run(
        [LAB / "as-dev", command], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def seconds(command: str, then: Callable[[], None] = lambda: None) -> float:
    """Seconds that a command on the laptop takes, including `then`."""
    started = time.monotonic()
    laptop(command)
    then()
    return time.monotonic() - started


def wait_for_health() -> None:
    while True:
        try:
            for port in PORTS:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)


def down() -> None:
    laptop(".venv/bin/launcher down -c bench --discard --yes")


def first_line(command: str) -> float:
    """Seconds until `command` prints the first log line, after SkyPilot's own messages."""
    started = time.monotonic()
    with subprocess.Popen(
        [LAB / "as-dev", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        if not any("Waiting for task resources" in line for line in lines):
            raise SystemExit(f"{command} showed no log")
        seen = time.monotonic() - started
        list(lines)  # read to the end: SkyPilot treats a closed pipe as a lost connection
        return seen


def line_delays() -> list[float]:
    """Seconds from a run writing a line to `logs` showing it, by the clock of one machine."""
    run_id = laptop(f".venv/bin/launcher run -c bench '{TICK}'").strip()
    command = f".venv/bin/launcher logs {run_id} -c bench"
    delays = []
    with subprocess.Popen(
        [LAB / "as-dev", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            word = line.split()[-1] if line.split() else ""
            if word.replace(".", "").isdigit() and "." in word:
                delays.append(time.time() - float(word))
    return delays[2:]  # the first lines were written before `logs` started


class LiveTable(Table):
    """A table that prints each row at once, because a launch takes a minute, with the load then."""

    def add(self, row: Sequence[str]) -> None:
        row = [*row, f"{os.getloadavg()[0]:.1f}"]
        super().add(row)
        print(*row, sep=" · ", file=sys.stderr, flush=True)


def measure(rounds: int) -> Table:
    table = LiveTable(["what", "launcher", "plain", "goal", "load"])
    launches: dict[str, list[float]] = {"launcher": [], "plain": []}
    laptop(".venv/bin/sky launch -y --dryrun bench-task.yaml")  # SkyPilot's first launch is slower
    for index in range(rounds):
        # Take turns, since the first one warms up the machine. The last cluster stays up for the
        # rest.
        for who in ("launcher", "plain") if (rounds - index) % 2 == 0 else ("plain", "launcher"):
            down()
            if who == "plain":
                launch = ".venv/bin/sky launch -y -d -c bench bench-task.yaml"
                launches[who].append(seconds(launch, then=wait_for_health))
            else:
                launches[who].append(seconds(".venv/bin/launcher up -c bench bench-task.yaml"))
            print(f"{who}: {launches[who][-1]:.1f} s", file=sys.stderr, flush=True)
    row = statistics.median(launches["launcher"]), statistics.median(launches["plain"])
    goal = f"{row[0] - row[1]:+.1f} s; at most +3"
    table.add(["up / `sky launch -d`, until healthy", f"{row[0]:.1f} s", f"{row[1]:.1f} s", goal])

    config = f"-F {LAB}/home/artdev/.sky/generated/ssh/bench -q"
    plain_sync = f"rsync -a --delete -e 'ssh {config}' bench-work/ bench:plain/"
    laptop(f"{plain_sync} && .venv/bin/launcher sync -c bench bench-work")
    syncs: dict[str, list[float]] = {"launcher": [], "plain": []}
    for index in range(2 * rounds):
        laptop(f"echo {index} >bench-work/one/17.txt")
        syncs["plain"].append(seconds(plain_sync))
        syncs["launcher"].append(seconds(".venv/bin/launcher sync -c bench bench-work"))
    row = statistics.median(syncs["launcher"]), statistics.median(syncs["plain"])
    goal = f"{row[0] / row[1]:.2f}x; at most 1.5x"
    table.add(["second sync, 1 of 10,000 files", f"{row[0]:.2f} s", f"{row[1]:.2f} s", goal])

    (CLONE / "checkpoint.py").write_text(CHECKPOINT)
    laptop(
        f"rsync -a -e 'ssh {config}' checkpoint.py kit bench:sky_workdir/ && "
        f"ssh {config} bench 'cd sky_workdir && python3 checkpoint.py'"
    )
    plain_pull = f"rsync -a -e 'ssh {config}' bench:sky_workdir/.art/ plain-home/"
    pulls: dict[str, list[float]] = {"launcher": [], "plain": []}
    for _ in range(rounds):
        laptop("rm -rf plain-home home")
        pulls["plain"].append(seconds(plain_pull))
        laptop("rm -rf plain-home")
        pulls["launcher"].append(seconds(".venv/bin/launcher pull -c bench --to home"))
    row = statistics.median(pulls["launcher"]), statistics.median(pulls["plain"])
    goal = f"{row[1] / row[0]:.0%} of its speed; at least 90%"
    table.add(["pull of 1.05 GB, verified", f"{row[0]:.1f} s", f"{row[1]:.1f} s", goal])

    delays = line_delays()
    delay = f"{statistics.median(delays):.2f} s, at most {max(delays):.2f} s"
    table.add(["delay of a line in a followed log", delay, "", "within 2 s"])
    for what, ours, plain in (
        ("the newest run", "logs", "logs bench"),
        ("the server", "logs server", "logs bench 1"),
    ):
        row = (
            statistics.median(
                first_line(f".venv/bin/launcher {ours} -c bench --no-follow") for _ in range(3)
            ),
            statistics.median(first_line(f".venv/bin/sky {plain} --no-follow") for _ in range(3)),
        )
        first = f"first log line of {what}"
        table.add([first, f"{row[0]:.1f} s", f"{row[1]:.1f} s", "within 2 s"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write bench/results/launcher.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    script = ROOT / "tests/lab/slurm.sh"
    try:
        subprocess.run([script, "up"], check=True)
        for folder in ("one", "two"):
            (CLONE / "bench-work" / folder).mkdir(parents=True)
            for number in range(5000):
                (CLONE / f"bench-work/{folder}/{number}.txt").write_text(f"{folder} {number}\n")
        (CLONE / "bench-work/health").write_text("ok\n")
        (CLONE / "bench-task.yaml").write_text(TASK)
        (CLONE / ".env").write_text(f"ART_PORT={PORTS[0]}\nART_OPENAI_PORT={PORTS[1]}\n")
        subprocess.run(["chown", "-R", "artdev:", CLONE], check=True)
        laptop("scripts/install && .venv/bin/sky check slurm")
        table = measure(arguments.rounds)
    finally:
        subprocess.run([script, "down"], check=True)
    print(f"\n{table}\n\n{machine(load, ('skypilot', 'fabric'))}")
    if arguments.write:
        what = "`launcher` compared with plain tools, on a Slurm cluster of one machine; medians"
        write_report("launcher", what, table, load, packages=("skypilot", "fabric"))


if __name__ == "__main__":
    main()
