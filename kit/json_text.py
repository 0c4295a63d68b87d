"""JSON that somebody else wrote: whatever is wrong with it is a `JSONDecodeError`."""

import json
from typing import Any


def parse(text: str) -> Any:
    """Return the value of a JSON text; one that is nested too deeply is not JSON either."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
