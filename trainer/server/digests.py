"""Digests by which the ledger finds texts and sampled tokens."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BYTES = 16


class TextDigest:
    """Hashes a text in parts. Texts under different keys never have the same digest."""

    def __init__(self, key: str = "") -> None:
        self._hash = hashlib.blake2b(key=key.encode(), digest_size=_BYTES)

    def add(self, text: str) -> bytes:
        """The digest of all parts so far, with this one."""
        self._hash.update(text.encode(errors="surrogatepass"))
        return self._hash.digest()


def text_digest(text: str) -> bytes:
    return TextDigest().add(text)


def fingerprint(names: str, logprobs: Sequence[float] | NDArray[np.float64]) -> bytes:
    """Hash tokens, as `token_id:N`, and logprobs, which differ after most other prompts.

    Logprobs are rounded: JSON preserves a double, but not every framework keeps it a double.
    Those of confident answers all round to zero, so a fingerprint may fit several entries.
    """
    rounded = np.round(np.asarray(logprobs, dtype=np.float64), 4) + 0.0  # -0.0 is 0.0
    return digest(names.encode() + rounded.tobytes())


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()
