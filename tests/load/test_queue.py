"""A queue of 5,000 jobs: its memory, its cap, and its way to the end."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from mlxq.producer import Producer, QueueFull
from mlxq.protocol.keys import LANES, Keys
from tests.load.conftest import StartWorker
from tests.load.memory import MIB, check, held_bytes, rss_bytes, used_bytes
from tests.server import Server

JOBS, WARM_JOBS = 5_000, 1_000
TRACED_JOBS = 1_000  # a trace of memory doubles what a submit costs
SUBMITTERS = 64
PROMPT = "x" * 1_000


async def submit(producer: Producer, jobs: range) -> None:
    numbers = iter(jobs)

    async def submit_in_turn() -> None:
        for number in numbers:
            await producer.submit(prompt=PROMPT, max_tokens=1, job_id=f"j{number}")

    await asyncio.gather(*(submit_in_turn() for _ in range(SUBMITTERS)))


async def depth(client: Redis, keys: Keys) -> int:
    return sum([await client.xlen(keys.lane(lane)) for lane in LANES])


async def drained(client: Redis, keys: Keys, *, to: int) -> None:
    async with asyncio.timeout(100):
        while await depth(client, keys) > to:
            await asyncio.sleep(0.02)


async def test_5_000_queued_jobs(
    own: Server, own_client: Redis, queue: str, start_worker: StartWorker
) -> None:
    keys = Keys(queue)
    async with Producer(own.url, queue, cap=JOBS) as producer:
        await producer.ping()
        server_bytes = await used_bytes(own_client)
        with held_bytes() as held:
            await submit(producer, range(TRACED_JOBS))
            check("producer: a job submitted and not read", held.now() / TRACED_JOBS, 16_384)
        await submit(producer, range(TRACED_JOBS, JOBS))
        server_grown = await used_bytes(own_client) - server_bytes
        check("server: a queued job and its subscription", server_grown / JOBS, 8_192)
        with pytest.raises(QueueFull, match="^queue_full: 5000 jobs are queued or running$"):
            await producer.submit(prompt=PROMPT, job_id="one-too-many")
        assert not await own_client.exists(keys.job("one-too-many"))
        assert await depth(own_client, keys) == JOBS

        worker = start_worker("--max-batch", "128", "--step-ms", "0", "--log-level", "warning")
        check("worker: a process that begins", rss_bytes(worker.pid), 160 * MIB)
        await drained(own_client, keys, to=JOBS - WARM_JOBS)
        worker_bytes = rss_bytes(worker.pid)
        await drained(own_client, keys, to=0)
        check("worker: grown over 4,000 jobs", rss_bytes(worker.pid) - worker_bytes, 8 * MIB)
        server_grown = await used_bytes(own_client) - server_bytes
        check("server: a finished job, kept", server_grown / JOBS, 24_576)

        again = await producer.submit(prompt=PROMPT, max_tokens=1, job_id="room-again")
        assert (await again.result(timeout=30)).finish_reason == "length"
    pipeline = own_client.pipeline(transaction=False)
    for number in range(JOBS):
        pipeline.hget(keys.job(f"j{number}"), "state")
        pipeline.xrevrange(keys.events(f"j{number}"), count=1)
    replies = await pipeline.execute()
    assert set(replies[::2]) == {b"done"}
    assert all(b'"type":"done"' in entries[0][1][b"e"] for entries in replies[1::2])
