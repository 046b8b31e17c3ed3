"""The whole path, with real worker processes, on every kind of server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis

from mlxq.producer import Producer
from mlxq.producer.job import JobHandle
from mlxq.protocol.events import Done, EventId, Resumed, Started, Token
from ops.lib.synthetic import answer, answer_text
from tests.chaos.worker import ROOT
from tests.deployments import kinds
from tests.deployments.kinds import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

KINDS = ("valkey", "redis", "cluster", "sentinel")
GUARD_S = 90.0
LEASE_S = 1.0
STEP_MS = 20  # slow: a job of some hundred tokens outlasts the start of a worker


@pytest.fixture(params=KINDS)
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    kind: str = request.param
    if kind == "redis" and kinds.redis_server() is None:
        assert not os.environ.get("CI"), "CI must have a redis-server"
        pytest.skip("no redis-server on this machine")
    made: dict[str, AbstractContextManager[Deployment]] = {
        "valkey": kinds.standalone(None),
        "redis": kinds.standalone(kinds.redis_server()),
        "cluster": kinds.cluster(),
        "sentinel": kinds.sentinel(tmp_path),
    }
    with made[kind] as deployment:
        yield deployment


class Workers:
    """Synthetic worker processes of one queue, by name. All are killed at the end."""

    def __init__(self, deployment: Deployment, queue: str, folder: Path) -> None:
        self._deployment = deployment
        self._queue = queue
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "ops.lib.synthetic", "--redis", self._deployment.url]
        command += ["--queue", self._queue, "--shards", str(self._deployment.shards)]
        command += ["--name", name, "--lease-s", str(LEASE_S)]
        command += ["--max-batch", "8", "--step-ms", str(STEP_MS)]
        with open(self._folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes.pop(name).wait()

    def drain(self, name: str) -> int:
        """SIGTERM; the exit code."""
        self._processes[name].send_signal(signal.SIGTERM)
        return self._processes.pop(name).wait(60)

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)


@pytest.fixture
def workers(deployment: Deployment, queue: str, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(deployment, queue, tmp_path)
    yield made
    made.close()


@pytest.fixture
async def producer(deployment: Deployment, queue: str) -> AsyncIterator[Producer]:
    async with Producer(deployment.url, queue, shards=deployment.shards) as made:
        yield made


async def _serving(producer: Producer, *names: str) -> None:
    async with asyncio.timeout(GUARD_S):
        while not set(names) <= {worker.name for worker in (await producer.status()).workers}:
            await asyncio.sleep(0.1)


async def _check(job: JobHandle, tokens: int) -> set[str]:
    """The whole stream is exact, also for who reads it late. Returns who worked on it."""
    events = [event async for event in job.events()]
    ids = [EventId.parse(event.id) for event in events]
    assert [event_id.seq for event_id in ids] == list(range(1, len(ids) + 1))
    assert [t for event in events if isinstance(event, Token) for t in event.ids] == answer(
        job.id, tokens
    )
    assert isinstance(events[-1], Done)
    result = await job.result(GUARD_S)
    assert result.text == answer_text(job.id, tokens)
    return {event.worker for event in events if isinstance(event, Started | Resumed)}


async def test_stream_kill_abort_drain(
    producer: Producer, workers: Workers, deployment: Deployment
) -> None:
    workers.start("one")
    await _serving(producer, "one")
    async with asyncio.timeout(GUARD_S):
        first = [await producer.submit(prompt="Hi", max_tokens=30) for _ in range(12)]
        for job in first:
            assert await _check(job, 30) == {"one"}

        long = [await producer.submit(prompt="Hi", max_tokens=400) for _ in range(6)]
        for job in long:
            await anext(aiter(job))
        assert await long[0].abort() == "aborted"
        assert (await long[0].result(GUARD_S)).finish_reason == "aborted"
        workers.start("two")
        await _serving(producer, "two")
        workers.kill("one")
        for job in long[1:]:
            assert await _check(job, 400) == {"one", "two"}

        last = await producer.submit(prompt="Hi", max_tokens=750)
        await anext(aiter(last))
        workers.start("three")
        await _serving(producer, "three")
        draining = asyncio.create_task(asyncio.to_thread(workers.drain, "two"))
        assert await _check(last, 750) <= {"two", "three"}
        assert await draining == 0
        status = await producer.status()
    assert sum(status.jobs.values()) == 0 and status.dead == 0
    if deployment.shards > 1:
        ports = {node.port for node in deployment.servers if _has_keys(node.port)}
        assert len(ports) > 1, "the shards are all on one node: the test showed nothing"


def _has_keys(port: int) -> bool:
    with redis.Redis(port=port) as client:
        return bool(client.dbsize())


@pytest.mark.parametrize("deployment", ["sentinel"], indirect=True)
async def test_failover_in_mid_stream(
    producer: Producer, workers: Workers, deployment: Deployment
) -> None:
    """The master dies when the replica has all it was told: every stream goes on exactly."""
    master, replica = deployment.servers
    workers.start("one")
    await _serving(producer, "one")
    jobs = [await producer.submit(prompt="Hi", max_tokens=375) for _ in range(4)]
    for job in jobs:
        await anext(aiter(job))
    checks = [asyncio.create_task(_check(job, 375)) for job in jobs]
    await asyncio.to_thread(_hand_over, master.port, replica.port)
    async with asyncio.timeout(GUARD_S):
        await asyncio.gather(*checks)
        after = await producer.submit(prompt="Hi", max_tokens=10)
        await _check(after, 10)


def _hand_over(master: int, replica: int) -> None:
    """Stops writes, waits until the replica has everything, and kills the master."""
    with redis.Redis(port=master) as client:
        client.execute_command("CLIENT", "PAUSE", "20000", "WRITE")
        wanted = client.info("replication")["master_repl_offset"]
        with redis.Redis(port=replica) as other:
            while other.info("replication")["slave_repl_offset"] < wanted:
                time.sleep(0.01)
        client.shutdown(nosave=True, now=True, force=True)
