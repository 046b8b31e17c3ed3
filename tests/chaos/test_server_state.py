"""The server lives, and what it holds or allows changes under the workers."""

from __future__ import annotations

import pytest
import redis
from redis.asyncio import Redis

from mlxq.protocol.errors import ServerUnreachable, UnknownJob
from mlxq.protocol.keys import GROUP, LANES
from tests.chaos.conftest import Build
from tests.chaos.house import House
from tests.server import Server


async def test_flushall(house: House) -> None:
    """`FLUSHALL` in mid-stream: readers are told `UnknownJob`, workers go on with new jobs.

    Promise: 7. Fails without: NOGROUP → `XGROUP CREATE` in take.lua (`pending`).
    """
    await house.start("one", "two")
    lost = await house.submit_many(6, tokens=100_000)
    await house.client.flushall()
    house.fault()
    kept = [await house.submit(tokens=50, job_id=reader.id) for reader in lost[:3]]
    for reader in lost[3:]:
        await reader.end()
        assert isinstance(reader.error, UnknownJob)
    for reader in kept:
        await reader.end()
    await house.check(lost=lost)


async def test_scripts_are_forgotten(build: Build) -> None:
    """`SCRIPT FLUSH` in mid-stream, many times.

    Promise: 1 2. Fails without: `except NoScriptError` in `run` and `run_all` (scripts.py).
    """
    house: House = await build(lease_s=2.0)
    await house.start("one", "two")
    jobs = await house.submit_many(6, tokens=200)
    for _ in range(20):
        await house.client.script_flush()
        await house.leases(0.02)
    house.fault()
    await house.submit(tokens=20)
    await house.check()
    assert {job.terminal.attempts for job in jobs} == {1}


async def test_groups_are_deleted(house: House) -> None:
    """`XGROUP DESTROY` of every lane's group, with jobs running and queued: nobody is blamed.

    Promise: 1 2. Fails without: the 0 of `XGROUP CREATE` in take.lua (`$` in its place).
    """
    await house.start("one", "two")
    jobs = await house.submit_many(2 * house.max_batch, tokens=200)
    jobs += [await house.submit(tokens=20) for _ in range(3)]
    for lane in LANES:
        if await house.client.exists(house.keys.lane(lane)):
            await house.client.xgroup_destroy(house.keys.lane(lane), GROUP)
    house.fault()
    await house.submit(tokens=20)
    await house.check()
    for job in jobs:
        assert (await house.hash(job.id)).get("crashes", "0") == "0"


async def refused(house: House) -> None:
    """A submit is refused honestly, and running jobs wait for several leases."""
    house.use_producer(submit_timeout_s=house.lease_s)
    with pytest.raises(ServerUnreachable, match="maxmemory|MISCONF"):
        await house.submit(tokens=20)
    await house.leases(2)
    await house.check_idle(house.alive)


async def test_no_memory(build: Build) -> None:
    """`OOM command not allowed` for several leases, then memory again.

    Promise: 1 2 6 7. Jobs are kept by their workers meanwhile. Fails without: error replies among
    UNANSWERED (link.py: ConnectionError in place of RedisError).
    """
    house: House = await build(lease_s=1.0)
    await house.start("one", "two")
    jobs = await house.submit_many(6, tokens=300)
    await house.client.config_set("maxmemory", 1)
    await refused(house)
    await house.client.config_set("maxmemory", 0)
    house.fault()
    await house.check()
    assert {job.terminal.attempts for job in jobs} == {1}


async def test_disk_full(build: Build) -> None:
    """Snapshots fail, and the server refuses all writes (MISCONF) for several leases.

    Promise: 1 2 7. Nobody can renew a lease meanwhile, and nobody can take one. Fails without:
    error replies among UNANSWERED (link.py: ConnectionError in place of RedisError).
    """
    house: House = await build(server=Server("--save", "3600 1"))
    await house.start("one", "two")
    jobs = await house.submit_many(6, tokens=300)
    (house.server.folder / "dump.rdb").mkdir()
    await snapshot(house.client, "err")
    await refused(house)
    (house.server.folder / "dump.rdb").rmdir()
    await snapshot(house.client, "ok")
    house.fault()
    await house.check()
    for job in jobs:
        assert (await house.hash(job.id)).get("strikes", "0") == "0"


async def snapshot(client: Redis, outcome: str) -> None:
    """Saves until the server says that it went like this."""
    while True:
        info = await client.info("persistence")
        if info["rdb_last_bgsave_status"] == outcome and not info["rdb_bgsave_in_progress"]:
            return
        try:
            await client.bgsave()
        except redis.ResponseError:
            pass  # one is under way
