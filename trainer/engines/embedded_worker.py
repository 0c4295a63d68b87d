"""The embedded engine's process: continuous batching over a decoder and its KV cache.

Requests join and leave between decode steps. Rows of the cache are kept without gaps, a prompt
that several choices share is computed once, and a batch samples from one LoRA at a time. A batch
that outgrows the cache's share of the memory gives up rows, which are computed again later.
"""

import argparse
import logging
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer import faults
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.batching import Call, Choice, Lora, cache_shape, prefill_batches
from trainer.engines.decoder import Decoder, KVCache
from trainer.engines.sampling import Sampling, choose
from trainer.engines.text import TextStream
from trainer.errors import BadRequest, NotFound
from trainer.policy.device import default_device, default_dtype, memory
from trainer.policy.model import load_model, read_lora_config
from trainer.processes.worker import Channel

logger = logging.getLogger(__name__)
ROWS = 64  # choices sampled at once; more wait
CACHE_SHARE = 0.25  # of the memory: the model and, on a laptop, the learner are there too


class EmbeddedWorker:
    """Owns the decoder; `run` answers the server until it goes."""

    def __init__(self, directory: Path, channel: Channel, budget: int | None = None) -> None:
        """`budget`: tokens that the cache may hold, if they are not to follow from the memory."""
        device = default_device()
        self._channel = channel
        self._handlers: dict[str, Callable[..., None]] = {
            "ready": lambda: None,
            "load": self._load,
            "unload": self._unload,
        }
        self._tokenizer = Tokenizer(directory)
        dtype = default_dtype(directory, device)
        self._decoder = Decoder(load_model(directory, lora=None, dtype=dtype, device=device))
        self._context = self._decoder.architecture.max_length
        self._loras: dict[str, Lora] = {}
        self._current: Lora | None = None
        self._waiting: deque[Choice] = deque()
        self._active: list[Choice] = []
        self._cache = self._new_cache()
        self._budget = budget or int(CACHE_SHARE * memory(device)) // self._cache.token_bytes

    def run(self) -> None:
        while self._channel.open:
            idle = not (self._waiting or self._active)
            for call, method, params in self._channel.poll(wait=idle):
                self._answer(call, method, params)
            try:
                self._admit()
                if self._active:
                    self._decode()
            except Exception as error:
                self._give_up(error)

    # Calls

    def _answer(self, call: int, method: str, params: dict[str, Any]) -> None:
        try:
            if method == "sample":
                self._enqueue(call, **params)  # answered as it is sampled
            elif method == "cancel":
                self._cancel(call)
            else:
                self._channel.done(call, self._handlers[method](**params))
        except Exception as error:  # a bad request must not end the worker
            self._channel.error(call, error)

    def _load(self, lora: str, path: str) -> None:
        if lora in self._loras:
            return
        directory = Path(path)
        tensors = load_file(directory / "adapter_model.safetensors")
        self._loras[lora] = read_lora_config(directory), tensors
        faults.reached("engine-loaded")

    def _unload(self, lora: str) -> None:
        self._loras.pop(lora, None)

    def _enqueue(
        self,
        call: int,
        *,
        prompt_ids: list[int],
        lora: str | None,
        n: int,
        max_tokens: int | None,
        temperature: float,
        top_p: float,
        top_k: int,
        stop: list[str],
        seed: int | None,
        stream: bool,
    ) -> None:
        if lora is not None and lora not in self._loras:
            raise NotFound(f"The LoRA `{lora}` is not loaded")
        if not prompt_ids or max(prompt_ids) >= self._decoder.architecture.vocab_size:
            raise BadRequest(
                "The prompt is empty, or has a token that the model does not know",
                hint="Leave out text that the tokenizer turns into a special token of its own",
            )
        room = self._context - len(prompt_ids)
        if room <= 0 or (max_tokens or 0) > room:
            raise BadRequest(
                f"{len(prompt_ids)} prompt tokens and `max_tokens` {max_tokens or 1} do not fit "
                f"the context of {self._context} tokens",
                hint="Shorten the messages, or lower `max_tokens`",
            )
        held = None if lora is None else self._loras[lora]
        owner = Call(call, prompt_ids, held, stream, unfinished=n)
        for index in range(n):
            chance = random.Random(None if seed is None else f"{seed}/{index}")
            text = TextStream(self._tokenizer, stop)
            sampling = Sampling(temperature, top_p, top_k)
            self._waiting.append(Choice(owner, index, max_tokens or room, sampling, chance, text))

    def _cancel(self, call: int) -> None:
        self._waiting = deque(choice for choice in self._waiting if choice.call.id != call)
        for choice in [choice for choice in self._active if choice.call.id == call]:
            self._remove(choice)

    def _give_up(self, error: Exception) -> None:
        """End the requests of the batch that cannot go on, or the one that could not join it."""
        if self._cache.keys[0].is_cuda and not isinstance(error, torch.OutOfMemoryError):
            raise error  # of anything else a GPU does not recover in this process
        calls = {choice.call.id for choice in self._active or [self._waiting[0]]}
        self._waiting = deque(choice for choice in self._waiting if choice.call.id not in calls)
        self._active.clear()
        self._cache = self._new_cache()  # it may have been left half resized, and the LoRA half set
        self._switch(None)
        for call in calls:
            self._channel.error(call, error)

    # The batch

    def _new_cache(self) -> KVCache:
        return self._decoder.new_cache(8, min(256, self._context))

    def _admit(self) -> None:
        """Give free rows to waiting choices, in their order, while they share the LoRA."""
        fresh: list[Choice] = []
        while self._waiting and len(self._active) < ROWS:
            lora = self._waiting[0].call.lora
            if lora is not self._current and self._active:
                break  # the next LoRA's turn comes when this batch has drained
            if not self._fits([*self._active, self._waiting[0]]):
                break
            self._switch(lora)
            fresh.append(self._waiting.popleft())
            self._active.append(fresh[-1])
        if fresh:
            self._advance(fresh, self._prefill(fresh))

    def _switch(self, lora: Lora | None) -> None:
        if lora is not self._current:
            self._current = lora
            self._decoder.use_lora(*(lora or (None, {})))

    def _prefill(self, fresh: list[Choice]) -> Tensor:
        """Fill the rows of the newest choices; returns the logits [B, V] of their first tokens."""
        prompts = [choice.seen for choice in fresh]
        first = len(self._active) - len(fresh)
        self._grow()
        rows: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(prompts, first):
            rows.setdefault(prompt, row)  # a prompt that several share is computed once
        logits: dict[tuple[int, ...], Tensor] = {}
        for batch in prefill_batches(rows):
            found = self._decoder.prefill(
                [list(prompt) for prompt in batch], [rows[prompt] for prompt in batch], self._cache
            )
            logits.update(zip(batch, found, strict=True))
        for prompt, source in rows.items():
            targets = [row for row, other in enumerate(prompts, first) if other == prompt]
            self._cache.copy_row(source, targets[1:], len(prompt))
        return torch.stack([logits[prompt] for prompt in prompts])

    def _decode(self) -> None:
        """One token for every active row."""
        faults.reached("engine-sampling")
        while not self._fits(self._active):
            self._waiting.appendleft(self._active.pop())
        self._grow()
        tokens = [choice.tokens[-1] for choice in self._active]
        positions = [choice.length - 1 for choice in self._active]
        logits = self._decoder.decode(tokens, positions, self._cache)
        self._advance(list(self._active), logits)

    def _advance(self, choices: list[Choice], logits: Tensor) -> None:
        """Draw a token for each choice, tell the server, and let the finished ones go."""
        tokens, logprobs = choose(
            logits, [c.sampling for c in choices], [c.random.random() for c in choices]
        )
        for choice, token, logprob in zip(choices, tokens, logprobs, strict=True):
            choice.tokens.append(token)
            choice.logprobs.append(logprob)
            text = choice.text.add(token)
            finish = None
            if token in self._tokenizer.eos_ids or choice.text.stopped:
                finish = "stop"
            elif len(choice.tokens) >= choice.limit:
                finish = "length"
            if finish:
                text += choice.text.finish()
                self._remove(choice)
            self._tell(choice, text, finish)

    def _tell(self, choice: Choice, text: str, finish: str | None) -> None:
        """Send what is new: token by token to a stream, else once at the end."""
        call = choice.call
        delta = choice.pending or {"index": choice.index, "text": "", "told": 0}
        delta["text"] += text
        choice.pending = delta
        if not (finish or call.stream):
            return
        told = delta.pop("told")
        delta["token_ids"] = choice.tokens[told:]
        delta["logprobs"] = choice.logprobs[told:]
        delta["finish_reason"] = finish
        self._channel.row(call.id, delta)
        choice.pending = {"index": choice.index, "text": "", "told": len(choice.tokens)}
        if finish:
            call.unfinished -= 1
            if not call.unfinished:
                self._channel.done(call.id)

    def _remove(self, choice: Choice) -> None:
        """Free a row; the last row moves into it, so that the active ones stay without gaps."""
        row = self._active.index(choice)
        last = self._active.pop()
        if last is not choice:
            self._cache.copy_row(len(self._active), [row], last.length)
            self._active[row] = last

    def _fits(self, choices: list[Choice]) -> bool:
        """Whether the cache may hold these and a token more of each; one alone always."""
        return len(choices) == 1 or len(choices) * _length(choices) <= self._budget

    def _grow(self) -> None:
        """Have room for the active choices and a token more of each."""
        rows, length = len(self._active), _length(self._active)
        if rows > self._cache.rows or length > self._cache.length:
            shape = cache_shape(rows, length, context=self._context, budget=self._budget)
            self._cache.resize(*shape)


def _length(choices: list[Choice]) -> int:
    return max(choice.length for choice in choices) + 1


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    EmbeddedWorker(parser.parse_args().model, Channel()).run()


if __name__ == "__main__":
    main()
