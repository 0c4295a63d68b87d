"""The embedded engine's process: continuous batching over a decoder and its KV cache.

Requests join and leave between decode steps. Active rows stay contiguous in the cache, a prompt
that several choices share is computed once, and a batch samples from one LoRA at a time. A batch
that outgrows the cache's share of the memory gives up rows, which are recomputed later.
"""

import argparse
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher
from torch import Tensor

from trainer import faults
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.batching import (
    LoadedLora,
    PendingChoice,
    PendingRequest,
    add_top_logprobs,
    apply_rules,
    cache_shape,
    new_choices,
    prefill_batches,
    score_prompts,
)
from trainer.engines.checks import token_limit
from trainer.engines.constraints import Grammars
from trainer.engines.decoder import Decoder, KVCache
from trainer.engines.engine import SampleRequest
from trainer.engines.sampling import choose
from trainer.errors import NotFound
from trainer.policy.device import default_device, default_dtype, memory
from trainer.policy.lora import read_lora
from trainer.policy.model import load_model
from trainer.processes.rpc import RpcServer
from trainer.processes.worker import connect_to_parent, run_worker

logger = logging.getLogger(__name__)
ROWS = 64  # choices sampled at once; more wait
CACHE_SHARE = 0.25  # of the memory; the model and, on a laptop, the learner need some too


class EmbeddedWorker:
    """Owns the decoder; `run` answers calls until the server disconnects."""

    def __init__(self, directory: Path, rpc: RpcServer, budget: int | None = None) -> None:
        """`budget`: tokens that the cache may hold; by default as many as fit `CACHE_SHARE`."""
        device = default_device()
        self._rpc = rpc
        self._handlers: dict[str, Callable[..., None]] = {
            "ready": lambda: None,
            "load": self._load,
            "unload": self._unload,
        }
        self._tokenizer = Tokenizer(directory)
        dtype = default_dtype(directory, device)
        self._decoder = Decoder(load_model(directory, lora=None, dtype=dtype, device=device))
        self._context = self._decoder.architecture.max_length
        self._loras: dict[str, LoadedLora] = {}
        self._current: LoadedLora | None = None
        self._waiting: deque[PendingChoice] = deque()
        self._active: list[PendingChoice] = []
        vocabulary = self._decoder.architecture.vocab_size
        self._grammars = Grammars(directory, self._tokenizer, vocabulary)
        self._compiling: list[tuple[list[PendingChoice], Future[LLMatcher]]] = []
        self._cache = self._new_cache()
        self._budget = budget or int(CACHE_SHARE * memory(device)) // self._cache.token_bytes

    def run(self) -> None:
        while self._rpc.open:
            idle = not (self._waiting or self._active or self._compiling)
            for call, method, params in self._rpc.poll(wait=idle):
                self._answer(call, method, params)
            try:
                self._take_compiled()
                self._admit()
                if self._active:
                    self._decode()
            except Exception as error:
                self._give_up(error)

    # Calls

    def _answer(self, call: int, method: str, params: dict[str, Any]) -> None:
        try:
            if method == "sample":
                # Rows and result follow from `_advance`.
                self._enqueue(call, SampleRequest.from_json(params))
            elif method == "cancel":
                self._cancel(call)
            else:
                self._rpc.send_result(call, self._handlers[method](**params))
        except Exception as error:  # a bad request must not end the worker
            self._rpc.send_error(call, error)

    def _load(self, lora: str, path: str) -> None:
        if lora in self._loras:
            return
        self._loras[lora] = read_lora(Path(path), self._decoder.architecture)
        faults.reached("engine-loaded")

    def _unload(self, lora: str) -> None:
        self._loras.pop(lora, None)

    def _enqueue(self, call: int, request: SampleRequest) -> None:
        if request.lora is not None and request.lora not in self._loras:
            raise NotFound(f"The LoRA `{request.lora}` is not loaded")
        vocabulary = self._decoder.architecture.vocab_size
        limit = token_limit(request, context=self._context, vocabulary=vocabulary)
        loaded = None if request.lora is None else self._loras[request.lora]
        pending = PendingRequest(call, request, loaded, unfinished=request.n)
        choices = new_choices(pending, limit, self._tokenizer)
        if request.constraint:
            self._compiling.append((choices, self._grammars.compile(request.constraint)))
        else:
            self._waiting.extend(choices)

    def _take_compiled(self) -> None:
        """Let the choices wait for a row whose constraint has been compiled."""
        if self._compiling and not (self._waiting or self._active):
            wait([matcher for _, matcher in self._compiling], 0.01, FIRST_COMPLETED)
        for entry in [entry for entry in self._compiling if entry[1].done()]:
            self._compiling.remove(entry)
            choices, matcher = entry
            try:
                for choice in choices:
                    assert choice.rules is not None
                    choice.rules.matcher = matcher.result().deep_copy()
                self._waiting.extend(choices)
            except Exception as error:
                self._rpc.send_error(choices[0].request.id, error)

    def _cancel(self, call: int) -> None:
        self._waiting = deque(choice for choice in self._waiting if choice.request.id != call)
        self._compiling = [c for c in self._compiling if c[0][0].request.id != call]
        for choice in [choice for choice in self._active if choice.request.id == call]:
            self._remove(choice)

    def _give_up(self, error: Exception) -> None:
        """Fail the requests of a batch that cannot continue, or the one that could not join it."""
        if self._cache.keys[0].is_cuda and not isinstance(error, torch.OutOfMemoryError):
            raise error  # a GPU process cannot recover from any other error
        calls = {choice.request.id for choice in self._active or [self._waiting[0]]}
        self._waiting = deque(choice for choice in self._waiting if choice.request.id not in calls)
        self._active.clear()
        # The error may have left the cache half resized, or the LoRA half applied.
        self._cache = self._new_cache()
        self._switch(None)
        for call in calls:
            self._rpc.send_error(call, error)

    # The batch

    def _new_cache(self) -> KVCache:
        return self._decoder.new_cache(8, min(256, self._context))

    def _admit(self) -> None:
        """Give free rows to waiting choices in order, as long as they use the same LoRA."""
        admitted: list[PendingChoice] = []
        while self._waiting and len(self._active) < ROWS:
            lora = self._waiting[0].request.lora
            if lora is not self._current and self._active:
                break  # the next LoRA has to wait until this batch has finished
            if not self._fits([*self._active, self._waiting[0]]):
                break
            self._switch(lora)
            admitted.append(self._waiting.popleft())
            self._active.append(admitted[-1])
        if not admitted:
            return
        logits = self._prefill(admitted)
        if all(choice.limit for choice in admitted):
            return self._advance(admitted, logits)
        rows = [row for row, choice in enumerate(admitted) if choice.limit]
        if rows:
            self._advance([admitted[row] for row in rows], logits[rows])
        for choice in [choice for choice in admitted if not choice.limit]:
            self._remove(choice)  # only its prompt was wanted
            self._send(choice, "", "length")

    def _switch(self, lora: LoadedLora | None) -> None:
        if lora is not self._current:
            self._current = lora
            self._decoder.use_lora(*(lora or (None, {})))

    def _prefill(self, admitted: list[PendingChoice]) -> Tensor:
        """Fill the rows of new choices and return the logits [B, V] of their next tokens."""
        prompts = [choice.context for choice in admitted]
        first = len(self._active) - len(admitted)
        self._grow()
        rows: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(prompts, first):
            rows.setdefault(prompt, row)  # compute a shared prompt once
        logits: dict[tuple[int, ...], Tensor] = {}
        for batch in prefill_batches(rows):
            states = self._decoder.prefill_states(
                [list(prompt) for prompt in batch], [rows[prompt] for prompt in batch], self._cache
            )
            last = self._decoder.logits(torch.stack([state[-1] for state in states]))
            logits.update(zip(batch, last, strict=True))
            score_prompts(admitted, dict(zip(batch, states, strict=True)), self._decoder.logits)
        for prompt, source in rows.items():
            targets = [row for row, other in enumerate(prompts, first) if other == prompt]
            self._cache.copy_row(source, targets[1:], len(prompt))
        return torch.stack([logits[prompt] for prompt in prompts])

    def _decode(self) -> None:
        """Sample one token for every active row."""
        faults.reached("engine-sampling")
        while not self._fits(self._active):
            self._waiting.appendleft(self._active.pop())
        self._grow()
        tokens = [choice.tokens[-1] for choice in self._active]
        positions = [choice.length - 1 for choice in self._active]
        logits = self._decoder.decode(tokens, positions, self._cache)
        self._advance(list(self._active), logits)

    def _advance(self, choices: list[PendingChoice], logits: Tensor) -> None:
        """Draw a token for each choice, send it, and remove finished choices."""
        changed, failed = apply_rules(choices, logits)
        tokens, logprobs = choose(
            logits, [c.sampling for c in choices], [c.random.random() for c in choices], changed
        )
        add_top_logprobs(choices, logits)
        for choice, token, logprob in zip(choices, tokens, logprobs, strict=True):
            if choice.request.id in failed:
                continue
            choice.tokens.append(token)
            choice.logprobs.append(logprob)
            if choice.rules:
                choice.rules.took(token)
            text = choice.text.add(token)
            finish = None
            if choice.text.stopped:
                finish = "stop"
            elif len(choice.tokens) >= choice.limit:
                finish = "length"
            if finish:
                text += choice.text.finish()
                self._remove(choice)
            self._send(choice, text, finish)
        for call, error in failed.items():
            self._cancel(call)
            self._rpc.send_error(call, error)

    def _send(self, choice: PendingChoice, text: str, finish: str | None) -> None:
        """Send the new tokens: each one immediately for a stream, otherwise all at the end."""
        request = choice.request
        choice.unsent_text += text
        if not (finish or request.sample.stream):
            return
        self._rpc.send_row(request.id, choice.unsent(finish))
        if finish:
            request.unfinished -= 1
            if not request.unfinished:
                self._rpc.send_result(request.id)

    def _remove(self, choice: PendingChoice) -> None:
        """Free a row, and move the last active row into it so that there is no gap."""
        row = self._active.index(choice)
        last = self._active.pop()
        if last is not choice:
            self._cache.copy_row(len(self._active), [row], last.length)
            self._active[row] = last

    def _fits(self, choices: list[PendingChoice]) -> bool:
        """Return whether the cache may hold these plus a token each. A single one always fits."""
        return len(choices) == 1 or len(choices) * _length(choices) <= self._budget

    def _grow(self) -> None:
        """Make room in the cache for the active choices plus a token each."""
        rows, length = len(self._active), _length(self._active)
        if rows > self._cache.rows or length > self._cache.length:
            shape = cache_shape(rows, length, context=self._context, budget=self._budget)
            self._cache.resize(*shape)


def _length(choices: list[PendingChoice]) -> int:
    """Return the length of the longest choice after its next token."""
    return max(choice.length for choice in choices) + 1


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    EmbeddedWorker(parser.parse_args().model, connect_to_parent()).run()


if __name__ == "__main__":
    run_worker(main)
