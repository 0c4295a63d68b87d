"""The GPU kernels on a machine without a GPU: Triton's interpreter runs them unchanged."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_compute_their_plain_formulas() -> None:
    python = subprocess.run(
        [ROOT / "scripts" / "parity"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    output = subprocess.run(
        [python, Path(__file__).with_name("kernels_reference.py")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    ).stdout
    errors = json.loads(output.splitlines()[-1])
    assert len(errors) == 37
    for name, error in errors.items():
        # fp8 has three bits of mantissa, so its products are off by a few percent. The interpreter
        # rounds to fp8 more coarsely than a GPU does. Decoding weighs values in fp16.
        bounds = {"fp8": 0.1, "decoding": 1e-3}
        assert error < bounds.get(name.split()[0], 1e-5), name
