"""256 jobs that stream at once to one producer."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from mlxq.producer import Producer
from ops.lib.synthetic import answer_text
from tests.load.conftest import StartWorker
from tests.load.memory import MIB, check, held_bytes, peak_used_bytes, rss_bytes, used_bytes
from tests.server import Server

STREAMS = 256
TOKENS = 80


async def test_256_streams_in_one_producer(
    own: Server, own_client: Redis, queue: str, start_worker: StartWorker
) -> None:
    worker = start_worker("--max-batch", str(STREAMS), "--step-ms", "20")
    async with Producer(own.url, queue) as producer:

        async def read() -> None:
            job = await producer.submit(prompt="Hi", max_tokens=TOKENS)
            text = "".join([piece async for piece in job])
            assert text == answer_text(job.id, TOKENS)

        await read()
        server_bytes, worker_bytes = await used_bytes(own_client), rss_bytes(worker.pid)
        with held_bytes() as held:
            async with peak_used_bytes(own_client) as peak, asyncio.timeout(100):
                await asyncio.gather(*(read() for _ in range(STREAMS)))
            check("producer: a stream", held.peak() / STREAMS, 131_072)
        check("worker: grown with 256 rows", rss_bytes(worker.pid) - worker_bytes, 32 * MIB)
        server_grown = peak.value - server_bytes
        check("server: a live token, all of its job", server_grown / STREAMS / TOKENS, 512)
