"""One choice of a vLLM response: turns its rows into deltas."""

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta
from trainer.engines.text import TextStream
from trainer.errors import TrainerError


class VllmChoice:
    """Decodes the text itself, so that it is the same as in every other engine."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.finished = False
        self._index = index
        self._text = TextStream(tokenizer, stop)

    def take(self, row: Json) -> Delta | None:
        """Return what `row` adds, without the tokens past a stop string."""
        if self.finished:
            return None
        delta = Delta(self._index)
        finish = row["finish_reason"]
        if finish not in (None, "stop", "length"):
            raise TrainerError(f"vLLM ended a choice with `{finish}`")
        logprobs = (row["logprobs"] or {}).get("token_logprobs") or []
        for token, logprob in zip(row["token_ids"] or [], logprobs, strict=True):
            delta.token_ids.append(token)
            delta.logprobs.append(logprob)
            delta.text += self._text.add(token)
            if self._text.stopped:
                finish = "stop"
                break
        if finish:
            delta.text += self._text.finish()
            delta.finish_reason = finish
            self.finished = True
        return delta if delta.token_ids or finish else None
