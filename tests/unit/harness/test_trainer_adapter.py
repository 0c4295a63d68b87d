"""A job that still runs when the harness ends: Ctrl-C in the middle of a step."""

import asyncio
import re

from trainer.harness.component_config import ArtTrainerAdapterConfig
from trainer.harness.trainer_adapter import ARTTrainerAdapter
from trainer.harness.types import (
    EpisodeItem,
    EpisodeItemRole,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

ANSWERS = {
    "/register": b"null",
    "/_prepare_backend_for_training": b'["http://127.0.0.1:9", "key"]',
    "/_get_step": b"0",
}


async def test_a_job_that_still_runs_ends_before_the_connection_does() -> None:
    asked: list[str] = []
    training, left = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A backend whose steps take for ever."""
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            (length,) = re.findall(r"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length))
            asked.append(head.split()[1])
            if asked[-1] == "/_train_model":
                training.set()
                await reader.read()
                writer.close()
                return left.set()
            body = ANSWERS[asked[-1]]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    server = await asyncio.start_server(answer, "127.0.0.1")
    backend = {"name": "m", "project": "p", "base_model": "tiny-random", "ip": "127.0.0.1"}
    port = server.sockets[0].getsockname()[1]
    config = {"_type": "openpipe_art_trainer_adapter", "backend": {**backend, "port": port}}
    adapter = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config))
    await adapter.initialize()
    item = EpisodeItem(role=EpisodeItemRole.USER, content="q", metadata={})
    group = [Trajectory(episode=[item], reward=1.0, metadata={"recorded": True})]
    ref = await adapter.submit(TrajectoryCollection(trajectories=[group], run_id="r"))
    await training.wait()
    await adapter.close()
    await left.wait()
    server.close()
    assert (await adapter.status(ref)).status == TrainingStatusEnum.CANCELED
    assert asked[-1] == "/_train_model"
