"""50 workers on one queue."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

from redis.asyncio import Redis

from mlxq.producer import Event, JobHandle, Producer, Started, Token
from ops.lib.synthetic import answer
from tests.chaos.worker import SyntheticProcess
from tests.load.fleet import SLOTS, WORKERS
from tests.load.memory import MIB, check, held_bytes, rss_bytes, used_bytes
from tests.server import Server

JOBS = 300  # a third of them waits for a slot
TOKENS = 8
SILENT = "prefill:100000"  # starts, and says nothing until it is aborted


class Fleet(SyntheticProcess):
    """All workers, in one process."""

    def __init__(self, url: str, queue: str, log: Path) -> None:
        super().__init__("fleet", url, url, queue, log)
        self._command = [sys.executable, "-m", "tests.load.fleet", url, queue]

    @property
    def grown_bytes(self) -> int:
        """Memory taken since the process began."""
        [begun] = [line for line in self.log_lines() if line["event"] == "begun"]
        return rss_bytes(self.pid) - int(begun["rss_bytes"])


async def read(producer: Producer) -> tuple[str, list[Event]]:
    job = await producer.submit(prompt="Hi", max_tokens=TOKENS)
    return job.id, [event async for event in job.events()]


async def fill(producer: Producer) -> tuple[JobHandle, str]:
    """A job that keeps its slot, and the worker that has it."""
    job = await producer.submit(prompt=SILENT)
    started = (event async for event in job.events() if isinstance(event, Started))
    return job, (await anext(started)).worker


async def test_50_workers(own: Server, own_client: Redis, queue: str, tmp_path: Path) -> None:
    fleet = Fleet(own.url, queue, tmp_path / "fleet.log")
    async with Producer(own.url, queue) as producer:
        await producer.ping()
        server_bytes = await used_bytes(own_client)
        with fleet:
            async with asyncio.timeout(100):
                while len((await producer.status()).workers) < WORKERS:
                    await asyncio.sleep(0.1)
                server_grown = await used_bytes(own_client) - server_bytes
                check("server: a worker that waits", server_grown / WORKERS, 262_144)
                check("fleet: a worker that waits", fleet.grown_bytes / WORKERS, MIB)
                with held_bytes() as held:
                    streams = await asyncio.gather(*(read(producer) for _ in range(JOBS)))
                    check("producer: a stream", held.peak() / JOBS, 131_072)
                check("fleet: a worker that has served", fleet.grown_bytes / WORKERS, 2 * MIB)
                every_slot = (fill(producer) for _ in range(WORKERS * SLOTS))
                filling = await asyncio.gather(*every_slot)
                await asyncio.gather(*(job.abort() for job, _ in filling))
            fleet.send(signal.SIGTERM)
            assert await asyncio.to_thread(fleet.wait) == 0

    for job_id, events in streams:
        ids = [token for event in events if isinstance(event, Token) for token in event.ids]
        assert ids == answer(job_id, TOKENS)
        assert sum(isinstance(event, Started) for event in events) == 1
    assert Counter(worker for _, worker in filling) == {f"mac{n}": SLOTS for n in range(WORKERS)}
