"""`trainer serve`: one ASGI app on two ports, in a process that never imports torch."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response

from kit.errors import ConfigError
from trainer.config import ServerConfig
from trainer.errors import TrainerError
from trainer.server import guard
from trainer.server.backend import Backend
from trainer.server.chat.template_limits import HEADER
from trainer.server.disconnects import LEFT, ClientLeft
from trainer.server.error_answers import add_handlers
from trainer.server.lease import unpulled_warnings, watch_lease
from trainer.server.messages.errors import AnthropicErrors
from trainer.server.routes import art, completions, messages, openai, preview, responses, rollouts
from trainer.server.workers import WrapEngine

logger = logging.getLogger(__name__)
LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(config: ServerConfig, backend: Backend) -> FastAPI:
    app = FastAPI(title="art-cluster", docs_url=None, redoc_url=None)

    @app.get("/health")
    @app.get("/healthcheck")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(backend.reports.metrics.render())

    @app.exception_handler(ClientLeft)
    async def client_left(_: Request, __: ClientLeft) -> Response:
        return Response(status_code=LEFT)

    add_handlers(app)
    key = config.api_key.get_secret_value() if config.requires_key and config.api_key else None
    app.add_middleware(guard.Guard, key=key)
    app.add_middleware(AnthropicErrors)  # outside the guard: it sees the guard's errors too
    if config.cors:  # outside the guard: a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=LOOPBACK_ORIGIN,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    app.include_router(art.routes(backend))
    app.include_router(preview.routes(backend))
    app.include_router(rollouts.routes(backend))
    for api in (openai, completions, responses, messages):
        router = api.routes(backend)
        app.include_router(router)
        app.include_router(router, prefix="/rollouts/{rollout}")
    return app


def serve(config: ServerConfig, *, wrap_engine: WrapEngine | None = None) -> None:
    """Serve until a signal arrives, or until the idle time or the lease is over."""
    # Threads that parse and write a step's groups release the interpreter at this interval instead
    # of 5 ms. Every answer needs the interpreter several times.
    sys.setswitchinterval(0.0005)
    # A step's groups are millions of objects without cycles. By default the garbage collector
    # scans all of them repeatedly while they are parsed, and blocks every answer.
    gc.set_threshold(50_000, 100, 100)
    if config.requires_key and config.api_key is None:
        raise ConfigError(
            f"Refusing to listen on `{config.host}` without a key",
            hint="Set `ART_API_KEY`, or stay on `127.0.0.1` and use `launcher tunnel`",
        )
    if config.nodes_host and config.api_key is None:
        raise ConfigError(
            f"Refusing to accept engines on `{config.nodes_host}` without a key",
            hint="Set `ART_API_KEY`, here and for `trainer engine` on the other machines",
        )
    sockets = [_bind(config.host, port) for port in (config.port, config.openai_port)]
    control, openai = (bound.getsockname()[1] for bound in sockets)
    backend = Backend(config, openai_port=openai, wrap_engine=wrap_engine)
    asyncio.run(_serve(config, backend, sockets, control))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only if the protocol is named. Nagle's algorithm would
    # delay every small answer on an open connection by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on `{host}:{port}`: {os.strerror(error.errno or 0)}",
            hint="Stop the program that uses the port, or choose `--port` and `--openai-port`",
        ) from error
    return bound


class _NoCancelledRequests(logging.Filter):
    """Drops the traceback of a request that is cancelled because the server stops."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Server(uvicorn.Server):
    """Stops the backend too, because uvicorn raises the signal again as soon as it has stopped."""

    def __init__(self, config: uvicorn.Config, backend: Backend) -> None:
        super().__init__(config)
        self._backend = backend

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._backend.stop()


async def _serve(
    config: ServerConfig, backend: Backend, sockets: list[socket.socket], control: int
) -> None:
    settings = uvicorn.Config(
        create_app(config, backend),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=10,
    )
    server = _Server(settings, backend)
    # The backend is stopped when uvicorn raises the signal again, so SIGTERM means exit code 0.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    logging.getLogger("uvicorn.error").addFilter(_NoCancelledRequests())
    serving = asyncio.create_task(server.serve(sockets=sockets))
    watching = asyncio.create_task(watch_lease(config, backend, server))
    try:
        await backend.start()
        logger.info("control API on http://%s:%s", config.host, control)
        logger.info("OpenAI API on http://%s:%s/v1", config.host, backend.openai_port)
        await serving
    except TrainerError:
        server.should_exit = True
        await serving
        raise
    finally:
        lease_over = watching.done()
        watching.cancel()
        await backend.stop()
        if lease_over:
            for line in unpulled_warnings(config):
                logger.warning("%s", line)
