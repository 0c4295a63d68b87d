"""Makes vLLM's engine hand over a choice when it ends, and not token by token.

vLLM's API process handles each token of each request on its own, although nobody waits for the
single tokens of `flat_completions`. vLLM loads this file with `--scheduler-cls`, so it imports
nothing of ours.
"""

import copy
from itertools import chain
from typing import Any

import numpy

MOST = 64  # outputs held apart: each keeps the arrays of all requests of its step in memory


class HeldOutputs:
    """A mixin for whichever scheduler vLLM would use."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._held: dict[str, list[Any]] = {}
        """The outputs of each unfinished request."""

    def update_from_output(self, *arguments: Any, **settings: Any) -> dict[int, Any]:
        result: dict[int, Any] = super().update_from_output(*arguments, **settings)  # type: ignore[misc]
        for client in result.values():
            client.outputs = [output for output in client.outputs if not self._holds(output)]
        return result

    def finish_requests(self, *arguments: Any, **settings: Any) -> Any:
        result = super().finish_requests(*arguments, **settings)  # type: ignore[misc]
        for request in self._held.keys() - self.requests.keys():  # type: ignore[attr-defined]
            del self._held[request]
        return result

    def _holds(self, output: Any) -> bool:
        """Hold an output back, or add to it what was held of its request."""
        if output.finish_reason is not None:
            if held := self._held.pop(output.request_id, None):
                join([*held, output])
            return False
        request = self.requests.get(output.request_id)  # type: ignore[attr-defined]
        parameters = request and request.sampling_params
        at_once = parameters and parameters.output_kind.name == "FINAL_ONLY"
        if not at_once or parameters.detokenize:  # it looks for a stop string in every token
            return False
        held = self._held.setdefault(output.request_id, [])
        held.append(output)
        if len(held) == MOST:
            self._held[output.request_id] = [join(held)]
        return True


def join(outputs: list[Any]) -> Any:
    """Make the last output of a request say what all of them say, and return it."""
    first, last = outputs[0], outputs[-1]
    last.new_token_ids = list(chain.from_iterable(output.new_token_ids for output in outputs))
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if logprobs:
        ids, values, ranks, *_ = zip(*logprobs, strict=True)
        # One request for the likeliest tokens widens the arrays of all requests in its step. The
        # sampled token always comes first.
        width = min(part.shape[1] for part in ids)
        last.new_logprobs = type(logprobs[0])(
            numpy.concatenate([part[:, :width] for part in ids]),
            numpy.concatenate([part[:, :width] for part in values]),
            numpy.concatenate(ranks),
        )
    last.events = list(chain.from_iterable(output.events or () for output in outputs)) or None
    for name in last.__struct_fields__:  # what only the first says, such as of the prompt
        if getattr(last, name) is None:
            setattr(last, name, getattr(first, name))
    return last


def scheduler(vllm_config: Any, **settings: Any) -> Any:
    """Return the scheduler that vLLM would use, with held outputs."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    own = config.get_scheduler_cls()
    return type("Scheduler", (HeldOutputs, own), {})(vllm_config=vllm_config, **settings)
