"""`trainer serve`: one ASGI app on two ports, which itself never touches torch."""

import asyncio
import hmac
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse

from kit.errors import ConfigError, KitError
from trainer.config import ServerConfig
from trainer.errors import TrainerError
from trainer.server import art_routes, openai_routes
from trainer.server.backend import Backend

logger = logging.getLogger(__name__)
OPEN_PATHS = {"/health", "/healthcheck"}


def create_app(config: ServerConfig, backend: Backend) -> FastAPI:
    app = FastAPI(title="art-cluster", docs_url=None, redoc_url=None)

    @app.get("/health")
    @app.get("/healthcheck")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(backend.metrics.render())

    @app.exception_handler(KitError)
    async def kit_error(_: Request, error: KitError) -> JSONResponse:
        return _error(getattr(error, "status", 500), error.message, error.hint)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        told = [
            f"`{'.'.join(str(part) for part in fault['loc'][1:]) or 'body'}` {fault['msg']}"
            for fault in error.errors()
        ]
        return _error(422, "The request is not valid: " + "; ".join(told), "")

    if not _is_loopback(config.host):
        app.middleware("http")(_require_key(config))
    app.include_router(art_routes.routes(backend))
    chat = openai_routes.routes(backend)
    app.include_router(chat)
    app.include_router(chat, prefix="/rollouts/{rollout}")
    app.include_router(openai_routes.rollout_routes(backend))
    return app


def _error(status: int, message: str, hint: str) -> JSONResponse:
    # `detail` for ART's clients and curl, `error` for OpenAI's.
    error = {"message": message, "hint": hint, "type": "invalid_request_error", "code": status}
    return JSONResponse({"detail": message, "error": error}, status_code=status)


def _require_key(
    config: ServerConfig,
) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    assert config.api_key is not None
    expected = f"Bearer {config.api_key.get_secret_value()}".encode()

    async def check(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if request.url.path in OPEN_PATHS or hmac.compare_digest(given, expected):
            return await answer(request)
        return _error(401, "The request carries no valid key", "Send `ART_API_KEY` as bearer token")

    return check


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(config: ServerConfig) -> None:
    """Serve until a signal, or until the idle time or the lease is over."""
    if not _is_loopback(config.host) and config.api_key is None:
        raise ConfigError(
            f"Refusing to listen on `{config.host}` without a key",
            hint="Set `ART_API_KEY`, or stay on `127.0.0.1` and use `launcher tunnel`",
        )
    sockets = [_bind(config.host, port) for port in (config.port, config.openai_port)]
    control, openai = (bound.getsockname()[1] for bound in sockets)
    asyncio.run(_serve(config, sockets, control, openai))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on `{host}:{port}`: {os.strerror(error.errno or 0)}",
            hint="Stop what uses that port, or choose `--port` and `--openai-port`",
        ) from error
    return bound


async def _serve(
    config: ServerConfig, sockets: list[socket.socket], control: int, openai: int
) -> None:
    backend = Backend(config, openai_port=openai)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(config, backend),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=10,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=sockets))
    watching = asyncio.create_task(_watch_lease(config, backend, server))
    try:
        await backend.start()
        logger.info("control API on http://%s:%s", config.host, control)
        logger.info("OpenAI API on http://%s:%s/v1", config.host, openai)
        await serving
    except TrainerError:
        server.should_exit = True
        await serving
        raise
    finally:
        watching.cancel()
        await backend.stop()


async def _watch_lease(config: ServerConfig, backend: Backend, server: uvicorn.Server) -> None:
    """Ask the server to exit once idle or out of lease; SkyPilot's autostop does the rest."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(1)
        now = time.monotonic()
        idle = 0 if backend.training else (now - backend.last_activity) / 60
        if config.exit_when_idle and idle >= config.exit_when_idle:
            logger.warning("exiting: nothing was sampled or trained for %.0f minutes", idle)
            break
        if config.max_hours and now - started >= config.max_hours * 3600:
            logger.warning("exiting: the lease of %s hours is over", config.max_hours)
            break
    server.should_exit = True
