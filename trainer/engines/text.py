"""Incremental detokenization: whole characters only, and nothing past a stop string or token."""

import codecs
from collections.abc import Collection, Sequence

from trainer.base_model.tokenizer import Tokenizer


class TextStream:
    """The text of one choice, token by token, and whether it has reached its end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """A stop string that ends within the first `min_tokens` tokens is ordinary text."""
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._stop_tokens = stop_tokens
        self._unstoppable = min_tokens
        # Hold back enough characters that no part of a stop string is ever returned.
        self._held_back = max((len(text) - 1 for text in self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token, and return the text that cannot be part of a stop string any more."""
        self._unstoppable -= 1
        if token in self._stop_tokens:
            self.stopped = True
            return ""
        if self._tokenizer.is_special(token):
            return ""
        before = len(self._pending)
        self._pending += self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._unstoppable < 0 and (found := self._stops_at(before)) is not None:
            self.stopped = True
            self._decoder.reset()
            self._pending, text = "", self._pending[:found]
            return text
        cut = max(len(self._pending) - self._held_back, 0)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def add_all(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens until one stops the text. Return how many, and the text as `add` does."""
        if self._stop:
            text = ""
            for number, token in enumerate(tokens, start=1):
                text += self.add(token)
                if self.stopped:
                    return number, text
            return len(tokens), text
        end = next((at for at, token in enumerate(tokens) if token in self._stop_tokens), None)
        self.stopped = end is not None
        shown = [token for token in tokens[:end] if not self._tokenizer.is_special(token)]
        text = self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown)))
        return len(tokens) if end is None else end + 1, text

    def _stops_at(self, before: int) -> int | None:
        """Return where the first stop string starts that ends after the first `before` letters."""
        starts = [
            at
            for text in self._stop
            if (at := self._pending.find(text, max(before - len(text) + 1, 0))) >= 0
        ]
        return min(starts, default=None)

    def finish(self) -> str:
        """Return the held-back text; an incomplete character becomes U+FFFD."""
        text = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        return text
