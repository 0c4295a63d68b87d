"""`trainer view`: the page over a directory of runs, without torch and without a server."""

import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kit.errors import ConfigError
from trainer.page.api import routes
from trainer.page.events import Events
from trainer.page.reader import Runs

HOST = "127.0.0.1"


def create_app(runs: Runs, events: Events, *, version: str) -> FastAPI:
    app = FastAPI(title="art-cluster", docs_url=None, redoc_url=None)
    # A web page elsewhere could point its own name at this machine and read the runs.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", HOST])
    app.include_router(routes(runs, version=version, events=events))
    return app


class Viewer(uvicorn.Server):
    """Ends the streams of open pages before uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, events: Events) -> None:
        super().__init__(config)
        self._events = events

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._events.stop()
        await super().shutdown(sockets)


def bind(port: int) -> socket.socket:
    """A socket on loopback; port 0 takes any free one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"Cannot listen on `{HOST}:{port}`: {error.strerror}", hint="Choose another `--port`"
        ) from error
    return bound


def serve(directory: Path, bound: socket.socket, *, version: str) -> None:
    """Serve the page of `directory` until a signal arrives."""
    runs = Runs(directory)
    events = Events(runs)
    app = create_app(runs, events, version=version)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    Viewer(config, events).run(sockets=[bound])
