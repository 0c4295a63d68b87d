"""lm-eval: an answer to a chat, and multiple choice by the log probabilities of completions."""

import os

from common import HELLO
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask


def evaluate(kind, url, model, settings, **task):
    rows = [{"question": HELLO, "choices": ["Hello there.", "Goodbye."], "answer": 0}]
    config = {
        "task": "hello",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **task,
    }
    found = simple_evaluate(
        model=kind,
        model_args={"base_url": url, "model": model, "num_concurrent": 1, **settings},
        tasks=[ConfigurableTask(config=config)],
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return found["samples"]["hello"][0]["resps"]


def chat(url, model):
    found = evaluate(
        *("local-chat-completions", f"{url}/chat/completions", model, {}),
        output_type="generate_until",
        doc_to_target="Hello there.",
        generation_kwargs={"until": ["\n\n"]},
        metric_list=[{"metric": "exact_match"}],
    )
    return found[0][0]


def completions(url, model):
    found = evaluate(
        *("local-completions", f"{url}/completions", model),
        {"tokenizer": os.environ["TOKENIZER"], "tokenizer_backend": "huggingface"},
        output_type="multiple_choice",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=[{"metric": "acc"}],
    )
    return len(found) == 2 and all(float(choice[0][0]) < 0 for choice in found)
