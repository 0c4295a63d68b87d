"""Makes vLLM's engine hand over many tokens of a choice at once, and not one by one.

vLLM's API process handles each token of each request on its own, although nobody waits for the
single tokens of `flat_completions`. It gets them in parts, so that little is left to do when many
choices end together. vLLM loads this file with `--scheduler-cls`, so it imports nothing of ours.
"""

import copy
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy

MOST = 32  # outputs in a part; each keeps the arrays of all requests of its step in memory


@dataclass
class Held:
    """The outputs of a request since its last part."""

    most: int
    outputs: list[Any] = field(default_factory=list)


class HeldOutputs:
    """A mixin for whichever scheduler vLLM would use."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._held: dict[str, Held] = {}
        self._begun = count()

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
        """Hold an output back, or add to it what was held of its request. Runs for every token."""
        held = self._held.get(output.request_id)
        if held is None:
            if output.finish_reason is not None or not self._may_hold(output):
                return False
            # The first parts differ in length: of choices that begin together, few hand one over
            # in the same step.
            held = self._held[output.request_id] = Held(1 + next(self._begun) % MOST)
        held.outputs.append(output)
        if output.finish_reason is not None:
            del self._held[output.request_id]
        elif len(held.outputs) < held.most:
            return True
        else:
            self._held[output.request_id] = Held(MOST)
        join(held.outputs)
        return False

    def _may_hold(self, output: Any) -> bool:
        """Whether nobody waits for the single tokens of an output's request."""
        request = self.requests.get(output.request_id)  # type: ignore[attr-defined]
        parameters = request and request.sampling_params
        at_once = parameters and parameters.output_kind.name == "FINAL_ONLY"
        return bool(at_once and not parameters.detokenize)  # which looks for a stop string


def join(outputs: list[Any]) -> None:
    """Make the last of some outputs of a request say what all of them say."""
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


def scheduler(vllm_config: Any, **settings: Any) -> Any:
    """Return the scheduler that vLLM would use, with held outputs."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    own = config.get_scheduler_cls()
    return type("Scheduler", (HeldOutputs, own), {})(vllm_config=vllm_config, **settings)
