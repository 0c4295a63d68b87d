"""Memory of each learner process while it loads a base model: alone, or one of several.

    python bench/loading.py [--against CHECKOUT] [--layers N] [--processes 1,2,4]

A model with random weights is stored in bf16, about 30 MB a layer, and loaded in fp32, as on most
CPUs. Peaks are those of the kernel (`VmHWM`), less the memory of the process before it loads. They
count pages of the file while it is mapped. With `--against`, another checkout of this repository
loads the same model, for comparison.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Table, write_report
from kit.errors import KitError
from trainer.base_model import tiny_random
from trainer.base_model.architecture import parse_architecture
from trainer.base_model.weight_files import expected_shapes
from trainer.learner.process import MODULE
from trainer.processes.worker import Worker

ROOT = Path(__file__).parents[1]
MIB = 2**20
SHAPE = {
    **tiny_random.CONFIG,
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Memory:
    """Bytes that a process needed to load a model, and bytes that it holds afterwards."""

    peak: int
    held: int


def write_model(
    directory: Path, config: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write a model with random weights, over bytes. Returns the number of its parameters."""
    directory.mkdir()
    tiny_random.write(directory)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in expected_shapes(parse_architecture(config)).items():
        drawn = torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)
        tensors[name] = (drawn + 1 if "norm" in name else drawn).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


async def memory_to_load(
    model: Path, processes: int, log: Path, checkout: Path = ROOT
) -> list[Memory]:
    """Load `model` in a learner of `checkout`. Returns the memory of each of its processes."""
    arguments = ["--base-model", str(model), "--dtype", "float32", "--processes", str(processes)]
    environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    worker = Worker("learner", MODULE, arguments, log=log, environment=environment)
    with contextlib.chdir(checkout):  # `python -m` imports from here first
        await worker.start()
    try:
        assert worker.pid is not None
        pids = [worker.pid] if processes == 1 else children(worker.pid)
        before = [status(pid)["VmRSS"] for pid in pids]
        await worker.call("load", lora={"rank": 8, "alpha": 16})
        # The first process answers for itself. The others report this call when they are done.
        with contextlib.suppress(KitError):
            await worker.call("load", lora={"rank": 0})
        while log.read_text().count("call rejected") < processes - 1:
            await asyncio.sleep(0.05)
        found = [status(pid) for pid in pids]
        return [
            Memory(now["VmHWM"] - earlier, now["VmRSS"] - earlier)
            for now, earlier in zip(found, before, strict=True)
        ]
    finally:
        await worker.stop()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def status(pid: int) -> dict[str, int]:
    """The bytes that the kernel counts for a process."""
    lines = Path(f"/proc/{pid}/status").read_text()
    return {name: int(size) * 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", lines)}


async def compare(layers: int, counts: list[int], checkouts: dict[str, Path]) -> None:
    load = os.getloadavg()[0]
    table = Table(["Processes", *(f"{name}, peak and held" for name in checkouts)])
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        parameters = write_model(model, {**SHAPE, "num_hidden_layers": layers})
        for count in counts:
            cells = [str(count)]
            for number, checkout in enumerate(checkouts.values()):
                log = Path(scratch) / f"{count}-{number}.log"
                found = await memory_to_load(model, count, log, checkout)
                peak, held = (max(getattr(one, it) for one in found) for it in ("peak", "held"))
                cells.append(f"{peak / MIB:,.0f} and {held / MIB:,.0f} MiB")
            table.add(cells)
    what = (
        f"Memory of the largest process of a learner that loads {parameters / 1e6:.0f}M parameters:"
        f" {2 * parameters / MIB:,.0f} MiB in the file (bf16), {4 * parameters / MIB:,.0f} MiB in "
        "memory (fp32)"
    )
    sys.stdout.write(f"{what}\n\n{table}\n")
    write_report("loading", what, table, load, packages=("torch", "safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured as well")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--processes", default="1,2,4")
    arguments = parser.parse_args()
    counts = [int(one) for one in arguments.processes.split(",")]
    checkouts = {"This checkout": ROOT}
    if arguments.against:
        checkouts = {"The other checkout": arguments.against.resolve(), **checkouts}
    asyncio.run(compare(arguments.layers, counts, checkouts))


if __name__ == "__main__":
    main()
