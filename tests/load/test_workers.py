"""50 workers on one queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from mlxq.producer import Event, JobHandle, Producer, Started, Token
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import EXIT_DRAINED, Config
from mlxq.worker.orders import Order, Orders
from mlxq.worker.service import serve
from ops.lib.fault import Faults
from ops.lib.synthetic import SyntheticBatch, Vocabulary, answer
from tests.load.memory import MIB, check, held_bytes, used_bytes
from tests.server import Server

WORKERS = 50
SLOTS = 4
JOBS = 600
TOKENS = 20
LONG = 10_000  # none of these ends before every slot of the fleet is taken
STEP_S = 0.2  # one loop serves the whole fleet and reads: 1,000 tokens a second leave it time


@asynccontextmanager
async def fleet(url: str, queue: str) -> AsyncIterator[None]:
    """Workers in this loop, each with threads and connections of its own; drained at the end."""
    tokenizer = Tokenizer(Vocabulary())
    orders = [Orders() for _ in range(WORKERS)]

    def load() -> SyntheticBatch:
        return SyntheticBatch(Faults(), max_batch=SLOTS, step_s=STEP_S, prefill_step=512)

    async def work(number: int) -> int:
        config = Config("synthetic", url, queue, name=f"mac{number}", max_batch=SLOTS)
        return await serve(config, load, orders[number], lambda path: tokenizer)

    working = [asyncio.create_task(work(number)) for number in range(WORKERS)]
    try:
        yield
    finally:
        for order in orders:
            order.give(Order.DRAIN)
        assert await asyncio.gather(*working) == [EXIT_DRAINED] * WORKERS


async def test_50_workers(own: Server, own_client: Redis, queue: str) -> None:
    async with Producer(own.url, queue) as producer:
        await producer.ping()
        server_bytes = await used_bytes(own_client)
        with held_bytes() as held:
            async with fleet(own.url, queue), asyncio.timeout(100):
                while len((await producer.status()).workers) < WORKERS:
                    await asyncio.sleep(0.1)
                server_grown = await used_bytes(own_client) - server_bytes
                check("server: a worker that waits", server_grown / WORKERS, 262_144)

                async def read() -> tuple[str, list[Event]]:
                    job = await producer.submit(prompt="Hi", max_tokens=TOKENS)
                    return job.id, [event async for event in job.events()]

                async def fill() -> tuple[JobHandle, str]:
                    job = await producer.submit(prompt="Hi", max_tokens=LONG)
                    started = (event async for event in job.events() if isinstance(event, Started))
                    return job, (await anext(started)).worker

                streams = await asyncio.gather(*(read() for _ in range(JOBS)))
                filling = await asyncio.gather(*(fill() for _ in range(WORKERS * SLOTS)))
                await asyncio.gather(*(job.abort() for job, _ in filling))
            check("a worker and its share of readers", held.peak() / WORKERS, 2 * MIB)

    for job_id, events in streams:
        ids = [token for event in events if isinstance(event, Token) for token in event.ids]
        assert ids == answer(job_id, TOKENS)
        assert sum(isinstance(event, Started) for event in events) == 1
    assert Counter(worker for _, worker in filling) == {f"mac{n}": SLOTS for n in range(WORKERS)}
