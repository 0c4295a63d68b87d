"""How every route of the page answers: checked JSON, or an error as a sentence with a hint."""

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from kit.errors import KitError
from trainer.page.cache import Cache

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Route(APIRoute):
    """Turns errors into `{"error": {"message", "hint"}}`, in every app that has the routes."""

    cache: ClassVar[Cache | None] = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if self.cache and request.url.path.startswith("/api/"):
                    return await self.cache.answer(self.path, request, handle)
                return await handle(request)
            except KitError as error:
                status = getattr(error, "status", 500)
                return error_answer(status if status < 500 else 404, error.message, error.hint)
            except RequestValidationError as error:
                fault = error.errors()[0]
                place = ".".join(str(part) for part in fault["loc"][1:])
                return error_answer(400, f"`{place}`: {fault['msg']}", "Correct the address")
            except OSError as error:
                return error_answer(404, f"A file cannot be read: {error.strerror}", "Try again")

        return answer


def cached_by(cache: Cache) -> type[Route]:
    """Routes whose answers are held in `cache`."""

    class Cached(Route):
        pass

    Cached.cache = cache
    return Cached


def error_answer(status: int, message: str, hint: str) -> Response:
    body = {"detail": message, "error": {"message": message, "hint": hint}}
    return JSONResponse(body, status, headers=HEADERS)


def json_answer(kind: type[BaseModel], value: Any) -> Response:
    """Check an answer against its type. Pydantic writes it much faster than FastAPI does."""
    content = kind.model_validate(value).model_dump_json()
    return Response(content, media_type="application/json", headers=HEADERS)
