"""Types that both programs share."""

from typing import Any

Json = dict[str, Any]
"""A JSON object."""
