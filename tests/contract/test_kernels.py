"""The GPU's kernels on a machine without one: Triton's interpreter runs them as they are."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_compute_what_their_formulas_do() -> None:
    python = subprocess.run(
        [ROOT / "scripts" / "parity"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    told = subprocess.run(
        [python, Path(__file__).with_name("kernels_reference.py")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    ).stdout
    errors = json.loads(told.splitlines()[-1])
    assert len(errors) == 19
    for name, error in errors.items():
        # fp8 has three bits of mantissa: a product of what is rounded so errs by some percent. The
        # interpreter's own rounding to it is coarser than a card's.
        assert error < (0.1 if name.startswith("fp8") else 1e-5), name
