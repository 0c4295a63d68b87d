"""What the tests of the page share: a real `trainer view`, and how a run is opened in it."""

import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, expect

WAIT_MS = 60_000  # two slow cores, and other tests beside this one


class View:
    """A real `trainer view`."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "view", str(directory), "--no-open"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> str:
        return self.address

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)


def open_page(page: Page, address: str, route: str) -> None:
    page.goto(address + route)
    expect(page.locator("#verdict .state")).to_be_visible()
