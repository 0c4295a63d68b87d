"""Loads what makes vLLM faster on a Hopper GPU. vLLM's workers import it.

The setting `worker_extension_cls` names a class that vLLM adds to its workers. Ours has nothing to
add: each module changes vLLM when it is imported.
"""

import decode_attention  # type: ignore[import-not-found]  # noqa: F401  # beside this file
import lora_linear  # type: ignore[import-not-found]  # noqa: F401
import stream_priority  # type: ignore[import-not-found]  # noqa: F401
import token_sampling  # type: ignore[import-not-found]  # noqa: F401


class Worker:
    """What vLLM adds to its workers."""
