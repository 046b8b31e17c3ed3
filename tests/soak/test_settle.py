"""The soak sees workers that idle beside work, and keys that would stay for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxq.producer import Producer
from mlxq.protocol.scripts import Scripts, run
from ops.lib.soak.check import check_keys, pass_time
from ops.lib.soak.news import Violation
from ops.lib.soak.plan import Shape
from ops.lib.soak.settle import IDLE_LEASES, Watch
from ops.lib.soak.world import QUEUE, World
from tests.server import Server

LEASE_S = 0.02
PID = 4_242
OWNER = "w1.0"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A server with one job on the queue, and one worker process that says it is there."""
    server = Server().start()
    world = World(server, Shape(lease_s=LEASE_S), tmp_path, guard=None)  # type: ignore[arg-type]
    member: Any = SimpleNamespace(pid=PID)
    world.members.append(member)
    async with Producer(server.url, QUEUE) as producer:
        await producer.submit(prompt="x", job_id="a")
    await world.client.hset(world.shards[0].worker(OWNER), "pid", PID)
    await world.client.expire(world.shards[0].worker(OWNER), 60)
    yield world
    await world.close()
    server.stop()


async def looks(world: World) -> None:
    """Looks for somewhat longer than a job may wait."""
    watch = Watch(world)
    for _ in range(4):
        await watch.look(["a"])
        await asyncio.sleep(IDLE_LEASES * LEASE_S / 2)


async def test_a_job_that_waits_beside_a_free_slot_is_found(world: World) -> None:
    with pytest.raises(Violation, match=r"\['a'\] wait, and \['w1.0'\] have free slots"):
        await looks(world)


async def test_a_job_whose_worker_is_gone_is_found(world: World) -> None:
    await run(world.client, Scripts(world.shards[0]).take("w2.0", 1, lease_ms=1_000))
    with pytest.raises(Violation, match="free slots"):
        await looks(world)


async def test_a_job_that_a_worker_holds_does_not_wait(world: World) -> None:
    await run(world.client, Scripts(world.shards[0]).take(OWNER, 1, lease_ms=1_000))
    await looks(world)


async def test_a_worker_that_is_not_up_does_not_idle(world: World) -> None:
    world.members.clear()
    await looks(world)


async def test_a_suspect_waits_for_an_empty_worker(world: World) -> None:
    await world.client.hset(world.shards[0].job("a"), "strikes", 1)
    await looks(world)


async def test_what_would_stay_for_ever_is_found(world: World) -> None:
    with pytest.raises(Violation, match="jobs:normal is not empty"):
        await check_keys(world)
    await run(world.client, Scripts(world.shards[0]).abort("a"))
    await check_keys(world)
    await world.client.persist(world.shards[0].events("a"))
    with pytest.raises(Violation, match="events:a would stay for ever"):
        await check_keys(world)
    with pytest.raises(Violation, match="left behind"):
        await pass_time(world)
    await world.client.expire(world.shards[0].events("a"), 60)
    await pass_time(world)
    assert not await world.client.exists(world.shards[0].job("a"))
