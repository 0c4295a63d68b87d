"""How quick the page is, and what it costs a run that trains.

    python -m bench.page DIRECTORY                 first paint and a step's open, in Chromium
    python -m bench.page DIRECTORY --loop 24       the pace of a loop with and without three pages

The first writes a run of 1,000 steps and 100,000 attempts into DIRECTORY, unless one is there. The
second trains `tiny-random` and opens and closes three pages in turns of eight steps, so that both
halves see the same machine. Its browser stands for three on other machines, so it gets only the
time that the cores have left. The server's own CPU time is shown too: it is far less noisy.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
from serving import Serving  # noqa: E402

from bench.page_run import write_run  # noqa: E402

LETTERS = TESTS / "e2e" / "small_letters"
TURN = 8  # steps with the pages open, then as many without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=100, help="attempts of each step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loop", type=int, default=0, metavar="STEPS", help="train that long")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        assert path, "chromium is not installed"
        if given.loop:
            path = _idle(path, given.directory)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        measure = loop if given.loop else reading
        rows = measure(browser, given)
        browser.close()
    print("| measured | median | worst | goal |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _idle(program: str, directory: Path) -> str:
    """A program that runs `program` only while no other process wants a core."""
    script = directory / "idle-browser"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec chrt --idle 0 {program} "$@"\n')
    script.chmod(0o755)
    return str(script)


def reading(browser: Browser, given: argparse.Namespace) -> list[tuple[str, ...]]:
    """Times of a browser that opens a long run and steps of it."""
    run = given.directory / "demo" / "models" / "synthetic"
    if not run.is_dir():
        write_run(given.directory, steps=given.steps, attempts=given.attempts, text=2000)
    command = [sys.executable, "-m", "trainer", "view", str(given.directory), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        paints, curves, opens, groups = [], [], [], []
        for turn in range(given.repeats + 1):  # the first reads the history into the server
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            begun = time.perf_counter()
            page.goto(f"{address}#/run/demo/synthetic", wait_until="commit")
            page.wait_for_selector(f"#reward figure[data-last='{given.steps}']")
            curves.append(time.perf_counter() - begun)
            entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(page.evaluate(entry) / 1000)
            page.wait_for_selector(".rows .row")
            for step in range(1 + turn, given.steps, max(given.steps // 7, 1)):
                title = f"Batch of step {step}"
                opens.append(_until(page, f"/step/{step}", ".batch h3", title))
                groups.append(_until(page, f"/step/{step}/group/2", ".attempt", ""))
            page.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    what = f"{given.steps:,} steps, {given.steps * given.attempts:,} attempts"
    return [
        (f"first paint, server just started ({what})", *_seconds(paints[:1]), "1 s"),
        ("first paint", *_seconds(paints[1:]), "1 s"),
        ("reward curve drawn", *_seconds(curves[1:]), "1 s"),
        ("a step opened", *_seconds(opens), "0.3 s"),
        ("a group of it opened", *_seconds(groups), "0.3 s"),
    ]


def _until(page: Page, route: str, selector: str, text: str) -> float:
    """Seconds from a change of the address until `selector` shows `text` and is painted."""
    # Measured inside the browser: Playwright polls, and would add its own rhythm.
    script = """([hash, selector, text]) => new Promise((done) => {
      const begun = performance.now();
      const old = document.querySelector(selector);
      const look = () => {
        const found = document.querySelector(selector);
        if (found && (text ? found.textContent === text : found !== old)) {
          requestAnimationFrame(() => done(performance.now() - begun));
        } else setTimeout(look, 2);
      };
      location.hash = hash;
      look();
    })"""
    milliseconds: float = page.evaluate(script, [f"#/run/demo/synthetic{route}", selector, text])
    return milliseconds / 1000


def loop(browser: Browser, given: argparse.Namespace) -> list[tuple[str, ...]]:
    """The pace of a real loop, in turns with three pages open and without."""
    directory, steps = given.directory, given.loop
    with Serving(directory / "server", "tiny-random") as server:
        for name in LETTERS.iterdir():
            if name.is_file():
                shutil.copy(name, directory / name.name)
        ports = [url.rpartition(":")[2] for url in (server.control, server.openai)]
        config = (directory / "config.yaml").read_text()
        config = config.replace("7999", ports[0]).replace("8000", ports[1])
        config = config.replace("num_epochs: 2", f"num_epochs: {steps}")
        config = config.replace("num_generations: 4", "num_generations: 64")
        (directory / "config.yaml").write_text(config)
        command = [sys.executable, "-m", "trainer", "finetune", "--config_file=config.yaml"]
        history = server.state / "e2e" / "models" / "letters" / "history.jsonl"
        with (directory / "finetune.log").open("wb") as log:
            training = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
            pages: list[Page] = []
            turns = _turns(training, lambda: _recorded(history), browser, pages, server)
            assert training.wait() == 0, (directory / "finetune.log").read_text()[-2000:]
        recorded = _recorded(history)
    gaps = {step: recorded[step] - recorded[step - 1] for step in recorded if step - 1 in recorded}
    opened = [gaps[turn.step] for turn in turns if turn.pages and turn.step in gaps]
    closed = [gaps[turn.step] for turn in turns if not turn.pages and turn.step in gaps]
    slower = statistics.median(opened) / statistics.median(closed) - 1
    busy = [[turn.cpu for turn in turns if turn.pages is pages] for pages in (False, True)]
    more = (statistics.fmean(busy[1]) - statistics.fmean(busy[0])) / statistics.median(closed)
    return [
        (f"a step without a page ({len(closed)})", *_seconds(closed), ""),
        (f"a step with three pages ({len(opened)})", *_seconds(opened), ""),
        ("slowdown", f"{slower:+.1%}", "", "under 1 %"),
        ("the server's CPU time in a step without a page", *_seconds(busy[0]), ""),
        ("the server's CPU time in a step with three pages", *_seconds(busy[1]), ""),
        ("more CPU time, as a share of a step", f"{more:+.1%}", "", ""),
    ]


@dataclass(frozen=True)
class Turn:
    """A step that was trained wholly with or wholly without open pages."""

    step: int
    pages: bool
    cpu: float
    """CPU seconds of the server's own process, without those of the engine and the learner."""


def _turns(
    training: "subprocess.Popen[bytes]",
    recorded: Callable[[], dict[int, float]],
    browser: Browser,
    pages: list[Page],
    server: Serving,
) -> list[Turn]:
    """Open and close the pages in turns; without the steps in which that happens."""
    found: list[Turn] = []
    last, before = 0, 0.0
    while training.poll() is None:
        step = max(recorded(), default=0)
        if step > last:
            cpu = _cpu_seconds(server.process.pid)
            if last % TURN and step == last + 1:  # the first step of a turn is half before it
                found.append(Turn(step, bool(pages), cpu - before))
            last, before = step, cpu
            if step % TURN == 0:
                if pages:
                    for page in pages:
                        page.close()
                    pages.clear()
                else:
                    pages += [browser.new_page() for _ in range(3)]
                    for page in pages:
                        page.goto(server.control)
        time.sleep(0.05)
    return found


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _recorded(history: Path) -> dict[int, float]:
    lines = history.read_text().splitlines() if history.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["recorded_at"] for row in rows if "num_gradient_steps" in row}


def _seconds(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.3f} s", f"{max(values):.3f} s"


if __name__ == "__main__":
    main()
