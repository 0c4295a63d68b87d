"""`trainer serve`: one ASGI app on two ports, in a process that never imports torch."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from kit.errors import ConfigError, KitError
from kit.files import make_private
from kit.state_dir import STATE_DIR, ignore_in_git
from trainer.config import ServerConfig
from trainer.server import guard
from trainer.server.backend import Backend
from trainer.server.browsers import BrowserGuard
from trainer.server.chat.template_limits import HEADER
from trainer.server.crowd import Crowd
from trainer.server.disconnects import LEFT, ClientLeft
from trainer.server.error_answers import add_handlers
from trainer.server.lease import unpulled_warnings, watch_lease
from trainer.server.messages.errors import AnthropicErrors
from trainer.server.pulled import refuse_training
from trainer.server.routes import art, completions, messages, openai, preview, responses, rollouts
from trainer.server.routes.page import Page
from trainer.server.stopping import STOP_SECONDS, end_within
from trainer.server.workers import WrapEngine

logger = logging.getLogger(__name__)
KEEP_ALIVE = 120  # seconds
GRACE_SECONDS = 5  # for requests in flight
LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(config: ServerConfig, backend: Backend) -> FastAPI:
    app = FastAPI(title="art-cluster", docs_url=None, redoc_url=None)

    @app.get("/health")
    @app.get("/healthcheck")
    async def health() -> Response:
        # A server that starts or lacks a file is up: launcher and clients wait for this answer.
        report = backend.health.report()
        return JSONResponse(report, status_code=503 if backend.health.stopping else 200)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(backend.reports.metrics.render())

    @app.exception_handler(ClientLeft)
    async def client_left(_: Request, __: ClientLeft) -> Response:
        return Response(status_code=LEFT)

    add_handlers(app)
    key = config.api_key.get_secret_value() if config.requires_key and config.api_key else None
    app.add_middleware(Crowd, limit=config.max_requests)
    page = Page(backend)
    app.state.events = page.events
    app.add_middleware(guard.Guard, key=key, sessions=page.sessions)
    app.add_middleware(
        BrowserGuard, host=config.host, allowed=config.allowed_hosts, any_host=key is not None
    )
    app.add_middleware(AnthropicErrors)  # outside the guards: it sees their errors too
    if config.cors:  # outside the guard: a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=LOOPBACK_ORIGIN,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    # The first routes are found soonest: those of rollouts, which a step calls a thousand times.
    samplers = [api.routes(backend) for api in (openai, completions, responses, messages)]
    for router in samplers:
        app.include_router(router, prefix="/rollouts/{rollout}")
    for router in samplers:
        app.include_router(router)
    app.include_router(page.router)
    training = [Depends(refuse_training(config.checkpoint))] if config.checkpoint else []
    app.include_router(art.routes(backend), dependencies=training)
    app.include_router(preview.routes(backend), dependencies=training)
    app.include_router(rollouts.routes(backend))
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
            hint="Set `ART_API_KEY`, or remove `--require-key`"
            if config.require_key
            else "Set `ART_API_KEY`, or stay on `127.0.0.1` and use `launcher tunnel`",
        )
    if config.ray and config.api_key is None:
        raise ConfigError(
            f"Refusing to join the Ray cluster `{config.ray}` without a key",
            hint="Set `ART_API_KEY`, here and for `scripts/ray-cluster` on every machine",
        )
    _allow_many_connections()
    os.umask(0o077)  # rollouts, keys in logs and weights are nobody else's
    if config.state_path.name == STATE_DIR:  # in the user's project, perhaps
        ignore_in_git(config.state_path)
    make_private(config.state_path)
    for path in config.state_path.glob("*"):
        make_private(path)
    sockets = [_bind(config.host, port) for port in (config.port, config.openai_port)]
    control, openai = (bound.getsockname()[1] for bound in sockets)
    backend = Backend(config, openai_port=openai, wrap_engine=wrap_engine)
    asyncio.run(_serve(config, backend, sockets, control))


def _allow_many_connections() -> None:
    """Raise the limit on open files: each connection is one, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has another limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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


class ExpectedErrors(logging.Filter):
    """Drops the traceback of a request that the server's stop cancels, or of a step that failed."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # A step that fails after its first row has a line of its own in the log. Its client sees
        # the connection close, for which Starlette raises an error.
        failed = isinstance(error, RuntimeError) and isinstance(error.__cause__, KitError)
        return not (failed or isinstance(error, asyncio.CancelledError))


class _Server(uvicorn.Server):
    """Stops the backend too, because uvicorn raises the signal again as soon as it has stopped."""

    def __init__(self, config: uvicorn.Config, backend: Backend) -> None:
        super().__init__(config)
        self._backend = backend

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        end_within(STOP_SECONDS, self._backend)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Also when the lease is over: a worker that cannot be stopped must not cost more.
        timer = end_within(STOP_SECONDS, self._backend)
        self._backend.health.stopping = True
        self.config.app.state.events.stop()  # type: ignore[union-attr]
        await super().shutdown(sockets)
        await self._backend.stop()
        timer.cancel()


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """The settings of the web server."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS,
        # Longer than any client keeps an idle connection (httpx 5 s, Go 90 s). A client that
        # sends a request while the server closes the connection loses it.
        timeout_keep_alive=KEEP_ALIVE,
    )


async def _serve(
    config: ServerConfig, backend: Backend, sockets: list[socket.socket], control: int
) -> None:
    server = _Server(uvicorn_config(create_app(config, backend)), backend)
    # The backend is stopped when uvicorn raises the signal again, so SIGTERM means exit code 0.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    logging.getLogger("uvicorn.error").addFilter(ExpectedErrors())
    serving = asyncio.create_task(server.serve(sockets=sockets))
    watching = asyncio.create_task(watch_lease(config, backend, server))
    starting = asyncio.create_task(backend.start())
    try:
        await asyncio.wait((starting, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            logger.info("control API on http://%s:%s", config.host, control)
            logger.info("OpenAI API on http://%s:%s/v1", config.host, backend.openai_port)
        await serving
    finally:
        lease_over = watching.done()
        watching.cancel()
        server.should_exit = True  # also if the start failed: nobody must talk to half a server
        failed = starting.done() and not starting.cancelled() and starting.exception() is not None
        end_within(STOP_SECONDS, backend, code=int(failed))
        starting.cancel()
        await asyncio.gather(starting, serving, return_exceptions=True)
        await backend.stop()
        if lease_over:
            for line in unpulled_warnings(config):
                logger.warning("%s", line)
