"""Hands the exact tokens of a step to the server, with the advantage that each was trained with.

The server stores them beside the attempts (`trainer/page/batches.py`). The learner's logprobs are
those of the forward pass that trained a token, so they cost nothing; only the first gradient step
of a train call has the weights that the step began with.
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kit.state_dir import BATCHES, step_name
from trainer.learner.pack import Row
from trainer.learner.prepare import Prepared
from trainer.learner.world import World

logger = logging.getLogger(__name__)
Record = Literal["nothing", "own", "all"]
"""`own` has logprobs of the rows of the first process only: the others do not take part."""

RECENT = 8  # steps before this one, whose files the server may still read


def file_of(checkpoints: Path, step: int) -> Path:
    """Where the server finds the tokens of a step: beside the files that it makes of them."""
    return checkpoints.parent / BATCHES / f".{step_name(step)}.npz"


class Recording:
    """Collects what a step trains on, and writes it for the server."""

    def __init__(self, record: Record, checkpoints: Path, step: int, world: World) -> None:
        self._record = record
        self._step = step
        self._recent = range(step - RECENT, step)
        self._path = file_of(checkpoints, step)
        self.world = world
        self._rows: list[Row] = []
        self._logprobs: dict[int, Tensor] = {}

    def begin(self, batches: Sequence[Sequence[Row]]) -> None:
        """Add the rows of gradient steps, of all processes."""
        if self._record != "nothing":
            self._rows += [row for batch in batches for row in batch]

    def add(self, row: Row, logprobs: Tensor) -> None:
        """Add the logprobs of a row that this process has computed."""
        if self._record != "nothing":
            # They stay on their device until the end: a copy now would wait for the GPU.
            self._logprobs[id(row)] = logprobs.detach()

    def write(self, prepared: Prepared) -> None:
        """Write the file of a step. A failure is logged: the step does not need it."""
        if self._record == "nothing":
            return
        logprobs = self._by_sample()
        if self.world.rank > 0:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            waiting = {self._path.with_name(f".{step_name(at)}.npz") for at in self._recent}
            for left in set(self._path.parent.glob(".*.npz")) - waiting:
                left.unlink()  # of a server that was killed before it read it
            with self._path.open("wb") as file:
                np.savez(file, **_arrays(self._step, prepared, logprobs))
        except OSError as error:
            logger.warning("the tokens of step %s are not recorded: %s", self._step, error)
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _by_sample(self) -> dict[int, Any]:
        """The logprobs [n] of each sample's chosen tokens, by the sample's id."""
        rows = self._rows
        if not rows:
            return {}
        parts = [
            self._logprobs.get(id(row), torch.zeros_like(row.sampler_logprobs)) for row in rows
        ]
        mine = [float(id(row) in self._logprobs) for row in rows]
        flat, counts = torch.cat(parts).float(), torch.tensor(mine, device=parts[0].device)
        if self._record == "all":
            self.world.sum([flat, counts])  # each process has computed other rows
        numbers, computed = flat.cpu().numpy(), counts.cpu().tolist()
        result, at = {}, 0
        for row, times in zip(rows, computed, strict=True):
            for sample in row.samples:
                end = at + len(sample.chosen)
                if times:  # every process repeats a row if there are too few
                    result[id(sample)] = numbers[at:end] / times
                at = end
        return result


def _arrays(step: int, prepared: Prepared, logprobs: dict[int, Any]) -> dict[str, Any]:
    samples = prepared.samples
    lengths = [len(sample.ids) for sample in samples]
    learner = np.full(sum(lengths), np.nan, dtype=np.float32)
    mask = np.zeros(len(learner), dtype=np.uint8)
    at = 0
    for sample, length in zip(samples, lengths, strict=True):
        mask[at + sample.chosen] = 1
        if (numbers := logprobs.get(id(sample))) is not None:
            learner[at + sample.chosen] = numbers
        at += length
    return {
        "step": np.array(step),
        "dropped": np.frombuffer(json.dumps(prepared.dropped).encode(), dtype=np.uint8),
        "lengths": np.array(lengths, dtype=np.int64),
        "ids": _joined((sample.array for sample in samples), np.int32),
        "mask": mask,
        "logprobs": _joined((sample.logprobs for sample in samples), np.float32),
        "learner": learner,
        **{
            name: np.array([getattr(sample, name) for sample in samples], dtype=kind)
            for name, kind in (
                *(("group", np.int64), ("number", np.int64)),
                *(("advantage", np.float64), ("weight", np.float64)),
            )
        },
    }


def _joined(parts: Iterable[Any], kind: Any) -> Any:
    arrays = [np.asarray(part, dtype=kind) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, kind)
