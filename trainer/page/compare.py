"""Compares two steps, or two runs, on the examples that both have."""

from kit.types import Json
from trainer.errors import BadRequest
from trainer.estimates import is_clear, mean_interval
from trainer.page import batches
from trainer.page.examples import means_at
from trainer.page.reader import Run

BASE = "base"
VALIDATION = "val"


def compare(run: Run, a: str, b: str, other: Run | None = None) -> Json:
    """Step `a` of `run` against step `b`, of the run `other` if there is one.

    Validation is compared where both steps have it, training otherwise. The attempts of training
    step 7 were sampled before it, so they show the model after step 6; `base` is validation at
    step 0 or the attempts of training step 1.
    """
    second = other or run
    for split in (VALIDATION, batches.TRAIN):
        left, right = _side(run, a, split), _side(second, b, split)
        both = sorted(left["means"].keys() & right["means"].keys())
        if both or split == batches.TRAIN:
            break
    paired = [
        {"example": name, "a": one, "b": two, "difference": two - one}
        for name in both
        if (one := left["means"][name], two := right["means"][name])
    ]
    differences = [float(pair["difference"]) for pair in paired]
    mean = sum(differences) / len(differences) if differences else None
    interval = mean_interval(differences)
    return {
        "a": _described(left),
        "b": _described(right),
        **{"split": split, "paired": paired, "n": len(paired)},
        **{"mean_difference": mean, "interval": interval},
        "clear": is_clear(len(paired), mean, interval),
    }


def _side(run: Run, step: str, split: str) -> Json:
    if step == BASE:
        number = 0 if split == VALIDATION else 1
    elif step.isdigit():
        number = int(step)
    else:
        raise BadRequest(f"`{step[:40]}` is no step", hint="Use a number or `base`")
    about = {"run": f"{run.project}/{run.name}", "step": number, "label": step}
    return {**about, "means": means_at(run, split, number)}


def _described(side: Json) -> Json:
    means = side.pop("means")
    mean = sum(means.values()) / len(means) if means else None
    return {**side, "examples": len(means), "mean": mean}
