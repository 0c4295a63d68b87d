"""Rules that change the logits of one choice before it is sampled. Most choices have none."""

from collections import Counter

import torch
from llguidance import LLMatcher
from torch import Tensor

from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest


class Rules:
    """Constraint, minimum length, bias and penalties of a choice, in the order of vLLM."""

    def __init__(self, request: SampleRequest, ends: frozenset[int]) -> None:
        """`ends`: the tokens that end the choice."""
        self._request = request
        self._ends = sorted(ends)
        self.matcher: LLMatcher | None = None

    @staticmethod
    def needed(request: SampleRequest) -> bool:
        return bool(
            request.constraint
            or request.min_tokens
            or request.logit_bias
            or request.frequency_penalty
            or request.presence_penalty
            or request.repetition_penalty != 1
        )

    def apply(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """Return changed logits [V] for the token after `tokens`, those sampled so far."""
        request = self._request
        logits = logits.float().clone()
        if self.matcher is not None:
            logits[~self._allowed(self.matcher, logits)] = -torch.inf
        if len(tokens) < request.min_tokens:
            logits[self._ends] = -torch.inf
        if request.logit_bias:
            biased, biases = zip(*request.logit_bias, strict=True)
            logits[list(biased)] += torch.tensor(biases, device=logits.device)
        if request.repetition_penalty != 1:
            seen = torch.tensor(sorted({*request.prompt_ids, *tokens}), device=logits.device)
            values, penalty = logits[seen], request.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if tokens and (request.frequency_penalty or request.presence_penalty):
            counts = Counter(tokens)
            used = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            logits[used] -= request.frequency_penalty * times + request.presence_penalty
        return logits

    def took(self, token: int) -> None:
        """Advance to the next token."""
        if self.matcher is not None:
            self.matcher.consume_token(token)

    def _allowed(self, matcher: LLMatcher, logits: Tensor) -> Tensor:
        # One byte for each token: 0 or 200.
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        if matcher.is_error():
            raise BadRequest(
                f"The structured output became too complex: {matcher.get_error().splitlines()[0]}",
                hint="Simplify the schema, the regular expression or the grammar",
            )
        return allowed[: len(logits)].bool().to(logits.device)
