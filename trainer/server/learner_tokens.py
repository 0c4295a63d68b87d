"""Reads the file in which the learner hands over the tokens of a step (`learner/record.py`)."""

import json
import logging
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from kit.types import Json
from trainer.page.batches import TokenSequence

logger = logging.getLogger(__name__)


@dataclass
class LearnerTokens:
    """The sequences of a step by group and number of their trajectory, and what was dropped."""

    sequences: dict[tuple[int, int], list[TokenSequence]] = field(default_factory=dict)
    dropped: list[Json] = field(default_factory=list)


def read(path: Path, step: int) -> LearnerTokens | None:
    """The tokens of `step`, or None if the learner wrote none: attempts are kept without them."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = dict(arrays.items())
        if int(found["step"]) != step:
            raise ValueError(f"it is of step {found['step']}")
        return _convert(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, BadZipFile, EOFError) as error:
        logger.warning("the learner's tokens of step %s cannot be read: %s", step, error)
        return None


def _convert(found: dict[str, Any]) -> LearnerTokens:
    result = LearnerTokens(dropped=json.loads(found["dropped"].tobytes() or b"[]"))
    at = 0
    rows = zip(
        *(found[name].tolist() for name in ("lengths", "group", "number", "advantage", "weight")),
        strict=True,
    )
    for length, group, number, advantage, weight in rows:
        part = slice(at, at + length)
        at += length
        sequence = TokenSequence(
            ids=array("i", found["ids"][part].tobytes()),
            mask=found["mask"][part].tobytes(),
            logprobs=array("f", found["logprobs"][part].tobytes()),
            learner=array("f", found["learner"][part].tobytes()),
            advantage=advantage,
            weight=weight,
        )
        result.sequences.setdefault((group, number), []).append(sequence)
    return result
