"""The page of the server's runs, and what only the server knows of them."""

import time
from pathlib import Path

from fastapi import APIRouter

from kit.state_dir import PRICE
from kit.types import Json
from kit.version import version
from trainer.page import api
from trainer.page.answers import LoginToken
from trainer.page.events import Events
from trainer.page.overview import State
from trainer.page.reader import Runs, finite
from trainer.page.sessions import TOKEN_SECONDS, Sessions
from trainer.server.backend import Backend
from trainer.server.json_routes import json_router
from trainer.server.model import Model


class Page:
    """The page's routes over a server's state directory."""

    def __init__(self, backend: Backend) -> None:
        self.sessions = Sessions()
        runs = Runs(backend.config.state_path)
        self.events = Events(runs)
        self._backend = backend
        self._started = time.time()
        self.router: APIRouter = json_router()
        self.router.include_router(
            api.routes(
                runs, version=version(), live=self, sessions=self.sessions, events=self.events
            )
        )
        self.router.post("/api/login-token")(self.login_token)

    async def login_token(self) -> LoginToken:
        """A token with which a browser opens the page once, without the key."""
        return LoginToken(token=self.sessions.new_token(), seconds=TOKEN_SECONDS)

    def state(self, project: str, name: str) -> State | None:
        """What the run does now; None if it is not loaded."""
        model = self._find(project, name)
        if model is None:
            return None
        trainings = self._backend.admission.steps(model)
        if not all(training.done for training in trainings):
            return "training"
        if sum(model.sampling.values()) > 0:
            return "sampling"
        return "degraded" if trainings and trainings[-1].error else "idle"

    def served(self, project: str, name: str) -> set[int]:
        model = self._find(project, name)
        return set(model.steps) if model and model.prepared else set()

    def lease(self) -> Json | None:
        config = self._backend.config
        price = config.dollars_per_hour or _price(config.state_path)
        if not (config.max_hours or config.exit_when_idle or price):
            return None
        ends = self._started + config.max_hours * 3600 if config.max_hours else None
        now = time.time()
        return {
            "ends_at": ends,
            "idle_minutes": config.exit_when_idle or None,
            "dollars_per_hour": price,
            "dollars_so_far": price * (now - self._started) / 3600 if price else None,
            "dollars_left": price * max(ends - now, 0) / 3600 if price and ends else None,
        }

    def _find(self, project: str, name: str) -> Model | None:
        models = self._backend.models
        return next((it for it in models if (it.project, it.name) == (project, name)), None)


def _price(state: Path) -> float:
    """The price that `launcher up` wrote; 0 without one."""
    try:
        return max(finite(float((state / PRICE).read_text())) or 0.0, 0.0)
    except (OSError, ValueError):
        return 0.0
