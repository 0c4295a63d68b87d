"""The batch of the embedded engine, also when memory is too small for all choices."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.loras import write_lora
from trainer.base_model.resolve import resolve
from trainer.engines.batching import cache_shape
from trainer.engines.constraints import Grammars
from trainer.engines.embedded_worker import EmbeddedWorker
from trainer.engines.engine import Constraint
from trainer.engines.rules import Rules
from trainer.errors import BadRequest

REQUEST = {
    "seed": 0,
    "lora": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "stop": [],
    "stream": False,
}


class Script:
    """An `RpcServer` that delivers all calls at once and closes after the last reply."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._calls = calls
        self._left = len(calls)
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        self.errors: dict[int, Exception] = {}

    @property
    def open(self) -> bool:
        return self._left > 0

    def poll(self, *, wait: bool) -> Iterator[tuple[int, str, dict[str, Any]]]:
        calls, self._calls = self._calls, []
        for number, call in enumerate(calls):
            yield number, "sample", {**REQUEST, **call}

    def send_row(self, call: int, row: dict[str, Any]) -> None:
        self.rows[call, row["index"]] = row

    def send_result(self, call: int, result: Any = None) -> None:
        self._left -= 1

    def send_error(self, call: int, error: Exception) -> None:
        self.errors[call] = error
        self._left -= 1


def make_worker(script: Script, budget: int | None = None) -> EmbeddedWorker:
    return EmbeddedWorker(resolve("tiny-random"), script, budget)  # type: ignore[arg-type]


def sampled(calls: list[dict[str, Any]], budget: int | None) -> tuple[Any, EmbeddedWorker]:
    script = Script(calls)
    worker = make_worker(script, budget)
    worker.run()
    assert not script.errors
    return script.rows, worker


def test_choices_that_outgrow_the_memory_are_dropped_and_finished_later() -> None:
    calls = [
        {"prompt_ids": [7, 8, 9] * (1 + number), "n": 4, "seed": number, "max_tokens": 60}
        for number in range(4)
    ]
    free, worker = sampled(calls, None)
    assert worker._cache.rows == 16
    tight, worker = sampled(calls, 200)  # holds fewer than 4 of the 16 at full length
    assert worker._cache.rows * worker._cache.length <= 200
    assert tight.keys() == free.keys() and len(tight) == 16
    for key, row in tight.items():
        assert row["token_ids"] == free[key]["token_ids"]
        assert row["logprobs"] == pytest.approx(free[key]["logprobs"], abs=1e-4)
        assert row["text"] == free[key]["text"]


def test_a_single_choice_is_finished_even_with_too_little_memory() -> None:
    (row,) = sampled([{"prompt_ids": [7], "n": 1, "seed": 0, "max_tokens": 50}], 8)[0].values()
    assert len(row["token_ids"]) == 50 or row["finish_reason"] == "stop"


def test_a_long_choice_does_not_keep_the_rows_of_many_short_ones() -> None:
    short = [{"prompt_ids": [7, 8], "n": 16, "seed": 0, "max_tokens": 4}]
    long = [{"prompt_ids": [7] * 300, "n": 1, "seed": 0, "max_tokens": 4}]
    worker = sampled(short + long, 16 * 310)[1]
    assert worker._cache.rows == 16
    worker = sampled(short + long, 16 * 300)[1]  # the long one waits for the short ones
    assert (worker._cache.rows, worker._cache.length) == (1, 512)


def test_a_cache_grows_by_doubling_within_the_context_and_the_budget() -> None:
    assert cache_shape(5, 20, context=8192, budget=1 << 20) == (8, 256)
    assert cache_shape(5, 300, context=400, budget=1 << 20) == (8, 400)
    assert cache_shape(5, 300, context=8192, budget=2000) == (6, 333)
    assert cache_shape(1, 300, context=8192, budget=100) == (1, 555)
    assert cache_shape(1, 300, context=400, budget=100) == (1, 400)


def test_a_failing_batch_fails_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([{"prompt_ids": [number], "n": 40, "max_tokens": 5} for number in range(3)])
    worker = make_worker(script)
    decode, times = worker._decoder.decode, iter(range(99))

    def failing(*arguments: Any) -> Any:
        if not next(times):
            raise RuntimeError("not this time")
        return decode(*arguments)

    monkeypatch.setattr(worker._decoder, "decode", failing)
    worker.run()  # 64 rows: all of the first request and part of the second
    assert set(script.errors) == {0, 1} and "not this time" in str(script.errors[0])
    assert {call for call, _ in script.rows} == {2} and len(script.rows) == 40


def test_an_invalid_lora_fails_only_its_own_request(tmp_path: Path) -> None:
    request = {"prompt_ids": [7, 8], "n": 1, "max_tokens": 8, "temperature": 0.0}
    script = Script(
        [
            {**request, "lora": "good"},
            {**request, "lora": "bad"},
            {**request, "lora": "good"},
            request,
        ]
    )
    worker = make_worker(script)
    worker._load("good", str(write_lora(tmp_path / "good", seed=1)))
    config, tensors = worker._loras["good"]
    (name, *_) = (name for name in tensors if "q_proj.lora_A" in name)
    worker._loras["bad"] = config, tensors | {name: tensors[name][:, :-1]}
    with pytest.raises(RuntimeError):
        worker._decoder.use_lora(*worker._loras["bad"])  # fails before the request joins the batch
    worker._decoder.use_lora(None, {})
    worker.run()
    assert set(script.errors) == {1}
    first, again, base = (script.rows[call, 0]["logprobs"] for call in (0, 2, 3))
    assert first == again != base


def test_a_prompt_with_unknown_tokens_is_rejected() -> None:
    script = Script([{"prompt_ids": ids, "n": 1, "max_tokens": 5} for ids in ([], [7, 10**6])])
    make_worker(script).run()
    assert [type(error) for error in script.errors.values()] == [BadRequest, BadRequest]


def test_a_reused_lora_name_samples_from_the_new_weights(tmp_path: Path) -> None:
    def greedy(worker: EmbeddedWorker) -> list[float]:
        request = {**REQUEST, "prompt_ids": [7, 8], "n": 1, "max_tokens": 8, "temperature": 0.0}
        script = Script([{**request, "lora": "m@1"}])
        worker._rpc = script  # type: ignore[assignment]
        worker.run()
        return list(script.rows[0, 0]["logprobs"])

    worker = make_worker(Script([]))
    found = []
    for seed in (1, 2):
        worker._load("m@1", str(write_lora(tmp_path / str(seed), seed=seed)))
        found.append(greedy(worker))
        worker._unload("m@1")
    fresh = make_worker(Script([]))
    fresh._load("m@1", str(tmp_path / "2"))
    assert found[0] != found[1] == greedy(fresh)


def test_a_constraint_is_compiled_while_other_choices_are_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others_are_done = threading.Event()

    class Waiting(Script):
        def send_result(self, call: int, result: Any = None) -> None:
            super().send_result(call, result)
            others_are_done.set()

    compile_now = Grammars._compile

    def slowly(self: Grammars, constraint: Constraint) -> Any:
        assert others_are_done.wait(60)
        return compile_now(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    constraint = {"kind": "choice", "value": '["yes", "no"]'}
    request = {"prompt_ids": [7], "n": 2, "max_tokens": 9}
    script = Waiting([{**request, "constraint": constraint}, request])
    make_worker(script).run()
    assert not script.errors
    assert {script.rows[0, index]["text"] for index in range(2)} <= {"yes", "no"}


def test_a_constraint_that_becomes_too_complex_fails_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Rules, logits: Any, tokens: list[int]) -> Any:
        raise BadRequest("too complex")

    monkeypatch.setattr(Rules, "apply", broken)
    request = {"prompt_ids": [7], "n": 3, "max_tokens": 9}
    script = Script([{**request, "min_tokens": 2}, request])
    make_worker(script).run()
    assert set(script.errors) == {0} and "too complex" in str(script.errors[0])
    assert {call for call, _ in script.rows} == {1}


def test_a_constrained_choice_that_lost_its_row_continues_in_its_grammar() -> None:
    call = {
        "prompt_ids": [7, 8, 9],
        "n": 6,
        "seed": 1,
        "max_tokens": 60,
        "constraint": {"kind": "regex", "value": "(ab|cde){12}"},
    }
    free, _ = sampled([call], None)
    tight, _ = sampled([call], 100)
    for key, row in tight.items():
        assert re.fullmatch("(ab|cde){12}", row["text"])
        assert row["token_ids"] == free[key]["token_ids"]
