"""The same task for `verifiers` up to 0.3: a dataset, and a rubric of two functions."""

import verifiers as vf
from datasets import Dataset
from kinds import KINDS, names_one, prompt, shortness

HELD_OUT = 4


def short(completion: list[dict[str, str]]) -> float:
    return shortness(completion[-1]["content"])


def named(completion: list[dict[str, str]], answer: str) -> float:
    return names_one(completion[-1]["content"], answer)


def load_environment() -> vf.Environment:
    rows = [{"question": prompt(kind), "answer": words} for kind, words in KINDS.items()]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:-HELD_OUT]),
        eval_dataset=Dataset.from_list(rows[-HELD_OUT:]),
        rubric=vf.Rubric(funcs=[short, named], weights=[0.5, 0.5]),
    )
