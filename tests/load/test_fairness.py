"""Under a flood of `high`, `low` moves on."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from mlxq.protocol.jobs import Job, encode_job
from mlxq.protocol.keys import Keys, Lane
from mlxq.protocol.scripts import Scripts, run, run_all
from tests.load.conftest import StartWorker

HIGH, LOW = 2_000, 40
EVERY = 8  # of so many jobs one comes from the lowest lane


async def enqueue(client: Redis, scripts: Scripts, lane: Lane, number: int) -> None:
    spec = encode_job(Job(prompt="Hi", max_tokens=1))
    calls = [scripts.enqueue(f"{lane}{n}", spec, lane=lane) for n in range(number)]
    await run(client, calls[0])
    await run_all(client, calls[1:])


async def times(client: Redis, keys: Keys, lane: Lane, number: int) -> list[int]:
    """When the jobs of a lane were taken, by the server's clock; those that were."""
    pipeline = client.pipeline(transaction=False)
    for n in range(number):
        pipeline.hget(keys.job(f"{lane}{n}"), "taken")
    replies: list[Any] = await pipeline.execute()
    return [int(taken) for taken in replies if taken]


async def test_low_jobs_move_under_a_flood_of_high(
    own_client: Redis, queue: str, start_worker: StartWorker
) -> None:
    """Take the aging turn out of take.lua to see `low` wait for the end of `high`."""
    keys = Keys(queue)
    scripts = Scripts(keys)
    await enqueue(own_client, scripts, "high", HIGH)
    await enqueue(own_client, scripts, "low", LOW)
    start_worker("--max-batch", "4", "--step-ms", "0")
    async with asyncio.timeout(100):
        while await own_client.xlen(keys.lane("low")):
            await asyncio.sleep(0.01)
    low = await times(own_client, keys, "low", LOW)
    high = await times(own_client, keys, "high", HIGH)
    before_last = sum(taken <= max(low) for taken in high)
    assert before_last <= 2 * EVERY * LOW
    assert await own_client.xlen(keys.lane("high"))
