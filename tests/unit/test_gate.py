import asyncio

from trainer.server.gate import Gate


async def test_training_waits_for_requests_in_flight_and_blocks_new_ones() -> None:
    gate, order = Gate(), []
    release = asyncio.Event()

    async def sample(name: str, wait: bool = False) -> None:
        async with gate.sampling():
            order.append(f"{name} begins")
            if wait:
                await release.wait()
            order.append(f"{name} ends")

    async def train() -> None:
        async with gate.closed():
            order.append("training")
            await asyncio.sleep(0)
            order.append("trained")

    first = asyncio.create_task(sample("first", wait=True))
    await asyncio.sleep(0)
    training = asyncio.create_task(train())
    await asyncio.sleep(0)
    second = asyncio.create_task(sample("second"))
    await asyncio.sleep(0.01)
    assert order == ["first begins"]
    release.set()
    await asyncio.gather(first, training, second)
    assert order == [
        "first begins", "first ends", "training", "trained", "second begins", "second ends",
    ]  # fmt: skip


async def test_training_that_is_cancelled_while_it_waits_lets_requests_pass() -> None:
    gate = Gate()
    async with gate.sampling():
        waiting = asyncio.create_task(gate.closed().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(1), gate.sampling():
            assert gate.in_use
    assert not gate.in_use


async def test_a_request_that_is_cancelled_while_it_waits_does_not_block_training() -> None:
    gate = Gate()
    async with gate.closed():
        waiting = asyncio.create_task(gate.sampling().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
    async with asyncio.timeout(1), gate.closed():
        pass
