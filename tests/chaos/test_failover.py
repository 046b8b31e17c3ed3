"""A replica that lacks the last events and jobs is promoted."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from redis.asyncio import Redis

from mlxq.protocol.errors import HistoryRewritten, UnknownJob
from mlxq.protocol.events import Resumed
from tests.chaos.conftest import Build
from tests.chaos.house import FOREVER, House
from tests.chaos.reader import GUARD_S, Reader
from tests.proxy import Proxy
from tests.server import Server, binary, free_port

SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor m 127.0.0.1 {master} 1
sentinel down-after-milliseconds m 500
sentinel failover-timeout m 3000
"""


class Pair(NamedTuple):
    """A master, its replica at the end of `line`, and the URL that leads to whoever is master."""

    master: Server
    replica: Server
    line: Proxy
    url: str


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    master = Server("--repl-diskless-sync-delay", "0").start()
    async with Proxy(master.port) as line:
        port = int(line.url.rpartition(":")[2])
        replica = Server("--replicaof", f"127.0.0.1 {port}", "--repl-timeout", "60")
        await asyncio.to_thread(replica.start)
        with sentinel(tmp_path, master.port) as sentinel_port:
            await until_found("'master_link_status': 'up'", replica.port, "INFO", "replication")
            await until_found(str(replica.port), sentinel_port, "SENTINEL", "REPLICAS", "m")
            yield Pair(master, replica, line, f"redis+sentinel://127.0.0.1:{sentinel_port}/m")
    replica.stop()


@contextmanager
def sentinel(folder: Path, master: int) -> Iterator[int]:
    """The port of a Sentinel that watches the master on port `master`."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(SENTINEL.format(port=port, folder=folder, master=master))
    command = [binary() or "redis-server", str(config), "--sentinel"]
    with open(folder / "sentinel.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def until_found(found: str, port: int, *words: str) -> None:
    async with asyncio.timeout(40):
        while found not in await told(port, *words):
            await asyncio.sleep(0.05)


async def told(port: int, *words: str) -> str:
    try:
        async with Redis(port=port) as client:
            reply: Any = await client.execute_command(*words)  # type: ignore[no-untyped-call]
            return str(reply)
    except redis.ConnectionError:
        return ""


async def until_resumed(reader: Reader) -> None:
    async with asyncio.timeout(GUARD_S):
        while not any(isinstance(event, Resumed) for event in reader.events):
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_replica_promoted_with_a_lost_tail(pair: Pair, build: Build) -> None:
    """The master dies; Sentinel promotes a replica that lacks its last events and jobs.

    Promise: 2 7. Who was given events that are gone is told `HistoryRewritten`, and never a token
    twice; who comes anew reads one exact stream; a job that is gone is `UnknownJob`. Fails
    without: GAP in emit.lua; or without both `raise self._rewritten(…)` in stream.py.
    """
    house: House = await build(server=pair.master)
    house.use_producer(pair.url)
    await house.start("one", "two", url=pair.url)
    jobs = await house.submit_many(5, tokens=FOREVER)
    for job in jobs:  # Redis 7.0 sends nothing to a new replica before its first ACK
        await until_found("running", pair.replica.port, "HGET", house.keys.job(job.id), "state")
    pair.line.reading.clear()
    for job in jobs:
        await job.go_on(100)
    gone = await house.submit(tokens=FOREVER)
    await gone.reach(tokens=1)
    house.server.kill()
    await until_found("'role': 'master'", pair.replica.port, "INFO", "replication")
    house.fault()
    await house.move_to(pair.replica)
    for reader in (*jobs, gone):
        await reader.end()
        assert isinstance(reader.error, UnknownJob if reader is gone else HistoryRewritten)
    again = [house.attach(job.id, FOREVER) for job in jobs]
    for reader in again:
        await until_resumed(reader)
        await reader.go_on(20)
        assert await reader.job.abort() == "aborted"
    await house.check(lost=[*jobs, gone])
    assert all(reader.terminal.attempts >= 2 for reader in again)
