"""Subscribers that do not read: nobody else pays for them, and nothing grows without bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from mlxq.producer import Event, Producer, Token
from mlxq.protocol.keys import Keys
from ops.lib.synthetic import answer, answer_text
from tests.load.conftest import StartWorker
from tests.load.memory import MIB, check, held_bytes, peak_used_bytes, rss_bytes, used_bytes
from tests.server import Server

JOBS = 8
TOKENS = 4_000


@pytest.fixture
def server_options() -> list[str]:
    return ["--client-output-buffer-limit", "pubsub", "1mb", "512kb", "10"]


async def test_iterators_that_are_not_read_hold_no_more_than_their_buffer(
    own: Server, own_client: Redis, queue: str, start_worker: StartWorker
) -> None:
    """Take the limit out of `Feed.offer` to see the producer grow instead."""
    start_worker("--max-batch", str(JOBS), "--step-ms", "1")
    async with Producer(own.url, queue, buffer=64) as producer:

        async def begin() -> tuple[str, AsyncIterator[Event]]:
            job = await producer.submit(prompt="Hi", max_tokens=TOKENS)
            events = job.events()
            await anext(events)
            return job.id, events

        begun = await asyncio.gather(*(begin() for _ in range(JOBS)))
        with held_bytes() as held:
            for job_id, _ in begun:  # their state tells when they have ended, and reads no stream
                while await own_client.hget(Keys(queue).job(job_id), "state") != b"done":
                    await asyncio.sleep(0.05)
            check("producer: a stream that is not read", held.now() / JOBS, 65_536)
        for job_id, events in begun:
            ids: list[int] = []
            async for event in events:
                if isinstance(event, Token):
                    ids += event.ids
            assert ids == answer(job_id, TOKENS)


async def test_a_connection_that_is_not_read_is_cut_and_costs_its_limit(
    own: Server, own_client: Redis, queue: str, start_worker: StartWorker
) -> None:
    worker = start_worker("--max-batch", str(JOBS), "--step-ms", "1")
    reader, writer = await asyncio.open_connection("127.0.0.1", own.port, limit=1)
    writer.write(b"CLIENT SETNAME deaf\r\nPSUBSCRIBE *\r\n")
    await writer.drain()
    assert (await reader.read(5)) == b"+OK\r\n"
    server_bytes, worker_bytes = await used_bytes(own_client), rss_bytes(worker.pid)
    async with Producer(own.url, queue) as producer:

        async def read() -> None:
            job = await producer.submit(prompt="Hi", max_tokens=TOKENS)
            assert "".join([text async for text in job]) == answer_text(job.id, TOKENS)

        async with peak_used_bytes(own_client) as peak, asyncio.timeout(100):
            while await is_connected(own_client):
                await asyncio.gather(*(read() for _ in range(JOBS)))
    writer.close()
    check("worker: grown meanwhile", rss_bytes(worker.pid) - worker_bytes, 32 * MIB)
    check("server: transcripts and one deaf client", peak.value - server_bytes, 32 * MIB)


async def is_connected(client: Redis) -> bool:
    return any(entry["name"] == "deaf" for entry in await client.client_list())
