"""The price of a card, from the launcher in a process of its own: only that may use SkyPilot."""

import json
import subprocess
import sys
from collections.abc import Sequence

TIMEOUT = 120.0


# Without the current directory, where a file of the user's may be called `launcher.py`.
LIST = (sys.executable, "-P", "-m", "launcher", "doctor", "--prices", "--json")


def price_of(card: str, command: Sequence[str] = LIST) -> tuple[float | None, str]:
    """What an hour of one `card` costs, and a sentence that says where, or why it is unknown."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
        )
        rows = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, _unknown(card, str(error))
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return None, _unknown(card, lines[0].removeprefix("error: ") if lines else "no answer")
    for row in rows:
        if (row["card"], row["count"]) == (card, 1):
            return row["per_hour"], f"{card} costs ${row['per_hour']:.2f} an hour on {row['cloud']}"
    return None, _unknown(card, "no cloud that SkyPilot can rent from lists it")


def _unknown(card: str, why: str) -> str:
    return f"The price of {card} is unknown ({why}); give it with `--price`"
