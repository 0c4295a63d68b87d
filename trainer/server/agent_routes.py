"""Routers of the APIs for agents, which read JSON more strictly than Python does.

Python's parser takes `NaN`, numbers too large for a float, and halves of surrogate pairs, as a cut
emoji leaves them. Answers cannot hold these: they echo parts of a request, and are UTF-8.
"""

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


def agent_router() -> APIRouter:
    return APIRouter(route_class=_StrictRoute)


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        return strict_json(await self.body())


def strict_json(body: bytes) -> Any:
    """Parse a body. Raises JSONDecodeError, which FastAPI reports, for all that is not JSON."""
    try:
        text = body.decode(json.detect_encoding(body))
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text.lower():  # the only way to write half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        fault = f"a text contains half of a character, `{half}`; cut texts only between characters"
        raise json.JSONDecodeError(fault, "", 0) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"`{constant}` is not a JSON number")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _refuse(digits)
