"""One choice of a vLLM response: turns its rows into deltas."""

from collections.abc import Collection

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta, SampleRequest
from trainer.engines.text import TextStream
from trainer.engines.vllm_requests import top_logprobs
from trainer.errors import TrainerError


class VllmChoice:
    """Decodes the text itself, so that it is the same as in every other engine.

    The tokens of a constrained choice come with its last delta, because their logprobs are known
    only then: vLLM's own are those of the constrained distribution, not the policy's.
    """

    def __init__(
        self, index: int, request: SampleRequest, tokenizer: Tokenizer, ends: Collection[int]
    ) -> None:
        self.finished = False
        self._index = index
        self._top = request.top_logprobs
        self._constrained = request.constraint is not None
        self._tokens: list[int] = []
        self._text = TextStream(tokenizer, request.stop, ends, request.min_tokens)

    def take(self, row: Json) -> Delta | None:
        """Return what `row` adds, without the tokens past a stop string."""
        if self.finished:
            return None
        delta = Delta(self._index)
        finish = row["finish_reason"]
        if finish not in (None, "stop", "length"):
            raise TrainerError(f"vLLM ended a choice with `{finish}`")
        logprobs = (row["logprobs"] or {}).get("token_logprobs") or []
        tokens: list[int] = row["token_ids"] or []
        if len(tokens) != len(logprobs):
            raise TrainerError(f"vLLM sent {len(tokens)} tokens with {len(logprobs)} logprobs")
        count, delta.text = self._text.add_all(tokens)
        delta.token_ids, delta.logprobs = tokens[:count], logprobs[:count]
        if self._text.stopped:
            finish = "stop"
        if tokens:
            delta.top_logprobs = top_logprobs(row, self._top)[: len(delta.token_ids)]
        if finish:
            delta.text += self._text.finish()
            delta.finish_reason = finish
            self.finished = True
        if self._constrained:
            self._hold_tokens(delta)
        return delta if delta.token_ids or delta.text or finish else None

    def _hold_tokens(self, delta: Delta) -> None:
        self._tokens += delta.token_ids
        delta.token_ids = self._tokens if delta.finish_reason else []
        delta.logprobs, delta.top_logprobs = [], []
