"""A queue split over shards: a job is where its id says, from any process."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from mlxq.producer import Producer
from mlxq.protocol.errors import BadRequest
from mlxq.protocol.keys import Keys, shard_names, shard_of
from tests.producer.hand import HandWorker
from tests.server import Server


async def test_jobs_are_placed_by_id_and_read_from_their_shard(
    server: Server, client: Redis, queue: str
) -> None:
    shards = [Keys(name) for name in shard_names(queue, 3)]
    async with Producer(server.url, queue, shards=3) as producer:
        jobs = [await producer.submit(prompt="Hi", job_id=f"j{n}") for n in range(12)]
        lengths = [await client.xlen(keys.lane("normal")) for keys in shards]
        assert lengths == [sum(shard_of(job.id, 3) == n for job in jobs) for n in range(3)]
        assert min(lengths) > 0
        status = await producer.status()
        assert (status.queue, status.jobs["normal"], status.waiting) == (queue, 12, 12)
        for keys in shards:
            for hand in await HandWorker(client, keys).take_all(12):
                await hand.start()
                await hand.finish(hand.id)
        async with Producer(server.url, queue, shards=3) as other:
            results = await asyncio.gather(*(other.attach(job.id).result(30) for job in jobs))
        assert [result.text for result in results] == [job.id for job in jobs]


def test_no_shards_is_refused(server: Server) -> None:
    with pytest.raises(BadRequest):
        Producer(server.url, shards=0)
