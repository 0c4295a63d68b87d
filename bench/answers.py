"""Measures the gateway's CPU time for each token of a whole answer, part by part.

    python bench/answers.py [--tokens 512] [--write]

The tokens come as vLLM sends them, with their logprobs. The plain way is what any server would do:
text token by token, and JSON by Starlette. Random tokens of SmolLM2's vocabulary.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from starlette.responses import JSONResponse

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Table, machine, write_report  # noqa: E402
from trainer.base_model.resolve import resolve  # noqa: E402
from trainer.base_model.tokenizer import Tokenizer  # noqa: E402
from trainer.engines.engine import SampleRequest  # noqa: E402
from trainer.engines.text import TextStream  # noqa: E402
from trainer.engines.vllm_choice import VllmChoice  # noqa: E402
from trainer.processes import large_json  # noqa: E402
from trainer.server.chat.answer import ChatAnswer  # noqa: E402
from trainer.server.chat.request import ChatRequest  # noqa: E402
from trainer.server.json_routes import LargeJson  # noqa: E402
from trainer.server.ledger import Entry, Ledger  # noqa: E402

ANSWERS = 50
PROMPT = [1] * 400
CHAT = {"model": "bench", "messages": [{"role": "user", "content": "Go"}]}
T = TypeVar("T")


class Clock:
    """Adds up the CPU seconds of each part."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    def __call__(self, part: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        self.spent[part] += time.process_time() - began  # type: ignore[assignment]
        return result


def answer(body: bytes, tokenizer: Tokenizer, ledger: Ledger, clock: Clock) -> None:
    """Do what the server does with one answer of vLLM, and some of it the plain way."""
    row = clock("read vLLM's answer", lambda: large_json.parse(body))["choices"][0]
    choice = VllmChoice(0, SampleRequest(PROMPT), tokenizer, tokenizer.eos_ids)
    delta = clock("text", lambda: choice.take(row))
    assert delta
    plain = TextStream(tokenizer, (), tokenizer.eos_ids)
    clock("text, plain", lambda: "".join(map(plain.add, row["token_ids"])))
    entry = Entry("bench/bench", 1, "", None, PROMPT, delta.token_ids, delta.logprobs)
    clock("ledger", lambda: ledger.record(entry, delta.text))
    built = ChatAnswer(ChatRequest.model_validate(CHAT), PROMPT, tokenizer)
    whole = clock("answer", lambda: (built.add(1, delta), built.whole())[1])
    clock("JSON", lambda: LargeJson(whole))
    clock("JSON, plain", lambda: JSONResponse(whole))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in an answer")
    parser.add_argument("--write", action="store_true", help="write bench/results/answers.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    tokenizer = Tokenizer(resolve("HuggingFaceTB/SmolLM2-135M-Instruct"))
    chance = random.Random(1)
    bodies = []
    for _ in range(ANSWERS):
        ids = [chance.randrange(1000, tokenizer.vocab_size) for _ in range(arguments.tokens)]
        logprobs = {"token_logprobs": [-chance.expovariate(0.1) for _ in ids]}
        row = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
        bodies.append(json.dumps({"choices": [row]}).encode())
    with tempfile.TemporaryDirectory() as directory:
        ledger = Ledger(Path(directory) / "ledger.db")
        for clock in (Clock(), Clock()):  # the first round spells tokens and is not counted
            for body in bodies:
                answer(body, tokenizer, ledger, clock)
        ledger.close()
    each = {part: spent / ANSWERS / arguments.tokens * 1e6 for part, spent in clock.spent.items()}
    table = Table(["part", "us/token", "plain us/token"])
    plain = {part: each.pop(f"{part}, plain") for part in ("text", "JSON")}
    for part, microseconds in each.items():
        table.add([part, f"{microseconds:.2f}", f"{plain[part]:.2f}" if part in plain else ""])
    total = sum(each.values())
    rest = sum(microseconds for part, microseconds in each.items() if part not in plain)
    table.add(["all", f"{total:.2f}", f"{rest + sum(plain.values()):.2f}"])
    what = f"The gateway's CPU time for answers of {arguments.tokens} tokens"
    print(f"{what}\n\n{table}\n\n{machine(load)}")
    if arguments.write:
        write_report("answers", what, table, load)


if __name__ == "__main__":
    main()
