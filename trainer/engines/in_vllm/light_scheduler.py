"""Makes a decoding step of vLLM's engine cheaper for the CPU, which may limit large batches.

`HeldOutputs` hands tokens to vLLM's API process in parts. That process handles each token of each
request on its own, although nobody waits for the single tokens of `flat_completions`, and would
have much to do when many choices end together. `LastPages` skips the search for memory if a token
fits the last page of its request. `bench/engine_steps.py` measures both. vLLM loads this file with
`--scheduler-cls`, so it imports nothing of ours.
"""

import copy
import logging
from itertools import count
from typing import Any

import numpy

logger = logging.getLogger("vllm.light_scheduler")
MOST = 32  # tokens in a part


class Rows:
    """The logprobs of a step as plain numbers, which are cheaper than three arrays a request."""

    def __init__(self, own: Any) -> None:
        self.own = own
        """vLLM's arrays: `logprob_token_ids`, `logprobs`, `sampled_token_ranks`, and the starts."""
        self.values = own.logprobs[:, 0].tolist()  # the sampled token comes first
        self.ranks = own.sampled_token_ranks.tolist()

    def slice_request(self, index: int, tokens: int) -> "tuple[Rows, int, int]":
        return self, index, tokens


class Held:
    """The outputs of a request since its last part."""

    __slots__ = ("events", "first", "most", "own", "ranks", "tokens", "values")

    def __init__(self, most: int) -> None:
        self.most = most
        self.first: Any = None
        self.own: Any = None  # vLLM's arrays of the last step: their types
        self.tokens: list[int] = []
        self.values: list[float] = []
        self.ranks: list[int] = []
        self.events: list[Any] = []

    def add(self, output: Any) -> None:
        if self.first is None:
            self.first = output
        self.tokens += output.new_token_ids
        if output.events:
            self.events += output.events
        if output.new_logprobs is not None:
            rows, index, tokens = output.new_logprobs
            self.own = rows.own
            if self.own.cu_num_generated_tokens is not None:
                index = self.own.cu_num_generated_tokens[index]
            self.values += rows.values[index : index + tokens]
            self.ranks += rows.ranks[index : index + tokens]

    def hand_over(self, last: Any) -> None:
        """Make the last output say what all of them say."""
        last.new_token_ids = self.tokens
        last.events = self.events or None
        if self.own is not None:
            ids, values, ranks = self.own[:3]
            last.new_logprobs = type(self.own)(
                numpy.array(self.tokens, dtype=ids.dtype)[:, None],
                numpy.array(self.values, dtype=values.dtype)[:, None],
                numpy.array(self.ranks, dtype=ranks.dtype),
            )
        for name in last.__struct_fields__:  # what only the first says, such as of the prompt
            if getattr(last, name) is None:
                setattr(last, name, getattr(self.first, name))


class HeldOutputs:
    """A mixin for whichever scheduler vLLM would use."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._held: dict[str, Held] = {}
        self._begun = count()

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, Any]:
        if sampled.logprobs is not None:
            sampled.logprobs = Rows(sampled.logprobs)
        result: dict[int, Any] = super().update_from_output(scheduled, sampled)  # type: ignore[misc]
        for client in result.values():
            client.outputs = [output for output in client.outputs if not self._holds(output)]
        return result

    def finish_requests(self, *arguments: Any, **settings: Any) -> Any:
        result = super().finish_requests(*arguments, **settings)  # type: ignore[misc]
        for request in self._held.keys() - self.requests.keys():  # type: ignore[attr-defined]
            del self._held[request]
        return result

    def _holds(self, output: Any) -> bool:
        """Hold an output back, or add to it what was held of its request. Runs for every token."""
        held = self._held.get(output.request_id)
        if held is None:
            if output.finish_reason is not None or not self._may_hold(output):
                if output.new_logprobs is not None:
                    rows, index, tokens = output.new_logprobs
                    output.new_logprobs = rows.own.slice_request(index, tokens)
                return False
            # The first parts differ in length: of choices that begin together, few hand one over
            # in the same step.
            held = self._held[output.request_id] = Held(1 + next(self._begun) % MOST)
        held.add(output)
        if output.finish_reason is not None:
            del self._held[output.request_id]
        elif len(held.tokens) < held.most:
            return True
        else:
            self._held[output.request_id] = Held(MOST)
        held.hand_over(output)
        return False

    def _may_hold(self, output: Any) -> bool:
        """Whether nobody waits for single tokens of an output's request, or for likelier ones."""
        request = self.requests.get(output.request_id)  # type: ignore[attr-defined]
        parameters = request and request.sampling_params
        at_once = parameters and parameters.output_kind.name == "FINAL_ONLY"
        # Detokenizing looks for a stop string.
        return bool(at_once and not parameters.detokenize and not parameters.logprobs)


class LastPages:
    """A mixin for whichever scheduler vLLM would use."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        try:
            take_short_ways(self.kv_cache_manager)  # type: ignore[attr-defined]
        except (AttributeError, ValueError) as error:
            logger.info("no short way through the cache for this model: %s", error)


def take_short_ways(manager: Any) -> None:
    """Skip most of vLLM's work on its cache for tokens that neither begin nor fill a page.

    Raises if the model has several kinds of layers, or layers that do not see all tokens.
    """
    (layers,) = manager.coordinator.single_type_managers
    size, pages, cached = layers.block_size, layers.req_to_blocks, layers.num_cached_block
    if type(layers).__name__ != "FullAttentionManager" or layers.block_pool.hash_block_size != size:
        raise ValueError(f"`{type(layers).__name__}` with pages of {size} tokens")
    allocate, cache = manager.allocate_slots, manager.cache_blocks
    nothing = manager.empty_kv_cache_blocks
    decoding = {"num_lookahead_tokens": 0}

    def allocate_slots(request: Any, num_new_tokens: int, *others: Any, **named: Any) -> Any:
        if num_new_tokens == 1 and not others and named == decoding:
            computed = request.num_computed_tokens
            inside = 0 < computed % size < size - 1
            if inside and computed < len(pages[request.request_id]) * size:
                return nothing
        return allocate(request, num_new_tokens, *others, **named)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks


def scheduler(vllm_config: Any, **settings: Any) -> Any:
    """Return the scheduler that vLLM would use, made cheaper."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    own = config.get_scheduler_cls()
    return type("Scheduler", (HeldOutputs, LastPages, own), {})(vllm_config=vllm_config, **settings)
