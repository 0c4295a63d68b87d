"""Incremental detokenization: whole characters only, and nothing past a stop string."""

import codecs
from collections.abc import Sequence

from trainer.base_model.tokenizer import Tokenizer


class TextStream:
    """The text of one choice, token by token."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        # Hold back enough characters that no part of a stop string is ever returned.
        self._held_back = max((len(text) - 1 for text in self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token, and return the text that cannot be part of a stop string any more."""
        if self._tokenizer.is_special(token):
            return ""
        self._pending += self._decoder.decode(self._tokenizer.token_bytes(token))
        found = [at for text in self._stop if (at := self._pending.find(text)) >= 0]
        if found:
            self.stopped = True
            self._pending, text = "", self._pending[: min(found)]
            return text
        cut = max(len(self._pending) - self._held_back, 0)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def finish(self) -> str:
        """Return the held-back text; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        return self._pending + self._decoder.decode(b"", final=True)
