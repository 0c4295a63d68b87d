"""Several engines as one: this machine's own, and those that `trainer engine` brings from others.

Every LoRA is on every replica before it is sampled from. A request goes to the replica with the
least to do; when that one is lost it is begun again on another, and a replica that returns gets
every LoRA that is served before it gets a request.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server

from trainer.config import ServerConfig
from trainer.engines.choose import chosen, vllm_arguments
from trainer.engines.engine import Delta, Engine, SampleRequest
from trainer.errors import NotFound, TrainerError, WorkerDied
from trainer.machines.link import Link, listen

logger = logging.getLogger(__name__)
ATTEMPTS = 4  # a request that ends so many engines would end every one


@dataclass(eq=False)
class Replica:
    """One engine that samples, and what it has to do."""

    engine: Engine | Link
    name: str
    busy: int = 0
    """Choices that it samples now."""
    turn: int = 0
    """Counts up: of two that are equally busy, the one that waited longer is next."""


@dataclass(frozen=True)
class Meeting:
    """Where other machines join, and what they are told to run."""

    host: str
    port: int
    key: str = field(repr=False)
    about: Mapping[str, Any]
    """What a machine needs to start the same engine, and its part of the learner."""
    nodes: int = 1
    """Machines that train together; so many less one get a number, the others only sample."""


def with_other_machines(own: Engine, config: ServerConfig, base_model: str) -> Engine:
    """Let other machines join `own` on the address in `config`; without one, return `own`."""
    if config.nodes_host is None:
        return own
    assert config.api_key  # without one the server does not start
    learner = {"master": config.learners_meet, "nodes": config.nodes}
    about = {
        "base_model": base_model,
        "engine": chosen(config),
        "engine_args": vllm_arguments(config),
        "rank": config.lora.rank,
        "learner": learner if config.nodes > 1 else None,
        "engine_cards": len(config.engine_devices.split(",")) if config.engine_devices else None,
    }
    meeting = Meeting(
        config.nodes_host,
        config.nodes_port,
        config.api_key.get_secret_value(),
        about,
        nodes=config.nodes,
    )
    return Replicas(own, meeting)


class Replicas:
    """See `Engine` for what it does. `own` is the engine of this machine."""

    def __init__(self, own: Engine, meeting: Meeting) -> None:
        self.name = own.name
        self._own = Replica(own, "this machine")
        self._engine = own
        self._meeting = meeting
        self._ready: list[Replica] = []
        self._links: dict[Link, int | None] = {}
        """Every machine that is connected, ready or not, with its number in the learner."""
        self._arguments: dict[str, Any] = {}
        self._served: dict[str, Path] = {}
        self._turns = itertools.count(1)
        self._server: Server | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> bool:
        return bool(self._ready)

    @property
    def port(self) -> int:
        """Where machines join, once started."""
        assert self._server
        return int(next(iter(self._server.sockets)).getsockname()[1])

    async def start(self) -> None:
        meeting = self._meeting
        if self._server is None:
            # First of all: other machines start their engines while ours starts.
            self._server = await listen(meeting.host, meeting.port, meeting.key, self._welcome)
        await self._engine.start()
        self._add(self._own)

    async def stop(self) -> None:
        self._ready.clear()  # who leaves from here on is not lost
        await asyncio.gather(*(link.goodbye() for link in self._links), return_exceptions=True)
        if self._server:
            self._server.close()
            await self._server.wait_closed()
        for task in (*self._tasks, *([self._reviving] if self._reviving else [])):
            task.cancel()
        await self._engine.stop()

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        await self._engine.configure(arguments)
        self._arguments.update(arguments)
        await asyncio.gather(
            *(
                self._or_lost(replica, replica.engine.call("configure", engine_args=arguments))
                for replica in list(self._ready)
                if isinstance(replica.engine, Link)
            )
        )

    async def make_room(self) -> bool:
        if self._meeting.nodes > 1:
            return False  # each learner would need it from the engine beside it
        if self._reviving:
            await asyncio.wait([self._reviving])  # what it loads would wake the engine
        return await self._engine.make_room()

    async def load(self, lora: str, path: Path) -> None:
        self._served[lora] = path
        if self._own not in self._ready:
            self._revive()
        await self._wait_for_one()
        await asyncio.gather(
            *(
                self._or_lost(replica, replica.engine.load(lora, path))
                for replica in list(self._ready)
            )
        )
        await self._wait_for_one()

    async def unload(self, lora: str) -> None:
        self._served.pop(lora, None)
        await asyncio.gather(
            *(self._or_lost(replica, replica.engine.unload(lora)) for replica in list(self._ready))
        )

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        for attempt in itertools.count(1):
            if request.lora is not None and request.lora not in self._served:
                raise NotFound(f"The LoRA `{request.lora}` is not loaded")
            replica = await self._least_busy()
            replica.busy += request.n
            replica.turn = next(self._turns)
            given = False
            held: list[Delta] = []
            try:
                async with aclosing(replica.engine.sample(request)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        if request.stream:
                            given = True
                            yield delta
                        else:
                            held.append(delta)
                break
            except WorkerDied as error:
                self._lose(replica, error)
                if given or attempt == ATTEMPTS:
                    raise
                logger.info("a request of %s begins again elsewhere", replica.name)
            finally:
                replica.busy -= request.n
        for delta in held:
            yield delta

    # Who samples

    async def _least_busy(self) -> Replica:
        await self._wait_for_one()
        return min(self._ready, key=lambda replica: (replica.busy, replica.turn))

    async def _wait_for_one(self) -> None:
        """Until there is a replica; with none our own engine is started again, or says why not."""
        while not self._ready:
            await asyncio.shield(self._revive())

    def _add(self, replica: Replica) -> None:
        self._ready.append(replica)
        logger.info("%s serves, one of %s replicas", replica.name, len(self._ready))

    async def _or_lost(self, replica: Replica, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` on a replica; on another machine any error, on ours a death, costs its place.

        What our own engine refuses, every other would refuse too, and the caller is told.
        """
        try:
            await work
        except WorkerDied as error:
            self._lose(replica, error)
        except (TrainerError, OSError) as error:
            if replica is self._own:
                raise
            self._lose(replica, error)

    def _lose(self, replica: Replica, error: Exception) -> None:
        if replica not in self._ready:
            return
        self._ready.remove(replica)
        told = getattr(error, "message", str(error) or type(error).__name__)
        logger.warning("%s is lost with %s choices under way: %s", replica.name, replica.busy, told)
        if isinstance(replica.engine, Link):
            self._do(replica.engine.close())
        else:
            self._revive()

    def _revive(self) -> asyncio.Task[None]:
        """Start our own engine again, once at a time, with every LoRA that is served."""
        if self._reviving is None or self._reviving.done():
            self._reviving = asyncio.create_task(self._revive_own())
            # Whoever waits for it gets its error; where nobody does, the next load tries again.
            self._reviving.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._reviving

    async def _revive_own(self) -> None:
        try:
            if not self._engine.running:
                await self._engine.start()
            await self._catch_up(self._engine)
        except TrainerError as error:
            logger.warning("the engine of this machine did not start again: %s", error.message)
            raise
        if self._own not in self._ready:
            self._add(self._own)

    async def _catch_up(self, engine: Engine | Link) -> None:
        """Load every LoRA that is served; at its return there is none that `engine` lacks."""
        held: set[str] = set()
        while missing := [lora for lora in self._served if lora not in held]:
            for lora in missing:
                if path := self._served.get(lora):  # else it was unloaded meanwhile
                    await engine.load(lora, path)
                held.add(lora)

    # Other machines

    async def _welcome(self, link: Link) -> None:
        """Have a machine start its engine, bring it up to date, and let it serve."""
        for other in [other for other in self._links if other.identity == link.identity]:
            await other.close()  # the same machine, of whose end nobody has told us
            await other.gone()
        number = self._number()
        self._links[link] = number
        replica = Replica(link, f"the engine on `{link.name}`")
        try:
            arguments = dict(self._arguments)
            logger.info("%s is starting", replica.name)
            await link.call("begin", **self._meeting.about, asked=arguments, number=number)
            await self._catch_up(link)
            await link.call("keep_only", loras=list(self._served))
            await self._catch_up(link)  # what came meanwhile
            if arguments == self._arguments:
                self._add(replica)
                await link.gone()
                self._lose(replica, link.died())
            else:
                await link.close()  # it joins again, and begins with the newer ones
        finally:
            self._links.pop(link, None)

    def _number(self) -> int | None:
        """The lowest number in the learner that no machine has."""
        free = set(range(1, self._meeting.nodes)) - set(self._links.values())
        return min(free, default=None)

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
