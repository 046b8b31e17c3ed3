"""A server at its maxmemory: new work is refused whole, and what frees memory still runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from mlxq.protocol.keys import LANES, Keys
from mlxq.protocol.scripts import ABORTED, DONE, EmitItem, Sweep, look
from tests.protocol.wire import TOKEN, Wire

Full = Callable[[], AbstractAsyncContextManager[None]]


@pytest.fixture
def full(client: Redis) -> Full:
    """Within this context every write that needs memory is refused."""

    @asynccontextmanager
    async def fill() -> AsyncIterator[None]:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            await client.config_set("maxmemory", 0)

    return fill


async def test_enqueue_leaves_nothing(wire: Wire, full: Full) -> None:
    async with full():
        with pytest.raises(OutOfMemoryError):
            await wire.enqueue()
    assert await wire.client.keys(f"{wire.keys.tag}:*") == []


async def test_emit_stores_all_or_nothing(wire: Wire, full: Full) -> None:
    await wire.running("a")
    await wire.running("b")
    items = [EmitItem("a", 1, 1, 1, TOKEN), EmitItem("b", 1, 1, 1, TOKEN)]
    before = [await wire.job("a"), await wire.job("b")]
    async with full():
        with pytest.raises(OutOfMemoryError):
            await wire.emit("w1", *items)
    assert [await wire.job("a"), await wire.job("b")] == before
    assert await wire.events("a") == [] == await wire.events("b")
    assert await wire.emit("w1", *items) == [DONE, DONE]


async def test_a_taken_job_can_be_acknowledged_and_kept(wire: Wire, full: Full) -> None:
    """Else a full server would look to TAKE like workers that never speak."""
    for job_id in ("a", "b"):
        await wire.enqueue(job_id)
    async with full():
        assert await wire.take_ids(n=2) == ["a", "b"]
        assert await wire.emit("w1", look("a", 1)) == [DONE]
        assert await wire.beat("w1", ("b", 1)) == [DONE]
    assert await wire.fields("a", "begun") == await wire.fields("b", "begun") == ["1"]


async def run_finish(wire: Wire) -> None:
    assert await wire.finish("w1", "a", 1, TOKEN, TOKEN, seq=2, tokens=2, result=b"{}") == DONE
    assert await wire.is_closed()
    assert len(await wire.events()) == 3


async def run_abort(wire: Wire) -> None:
    assert await wire.abort() == "aborted"
    assert await wire.is_closed()


async def run_gate_in_emit(wire: Wire) -> None:
    assert await wire.look() == ABORTED
    assert await wire.is_closed()


async def run_gate_in_take(wire: Wire) -> None:
    await wire.lapse("a")
    assert await wire.take_ids("w2") == []
    assert await wire.is_closed()


async def run_sweep(wire: Wire) -> None:
    assert await wire.sweep() == Sweep(1, 1, True)
    assert await wire.is_closed()


async def run_release(wire: Wire) -> None:
    assert await wire.release("w1", "drain", ("a", 1)) == [DONE]
    assert await wire.event_ids() == ["1-1", "1-2"]


async def run_release_crash(wire: Wire) -> None:
    assert await wire.release("w1", "crash", ("a", 1)) == [DONE]
    assert await wire.fields("a", "state", "crashes") == ["queued", "1"]


async def run_take_of_a_lapsed_job(wire: Wire) -> None:
    await wire.lapse("a")
    assert await wire.take_ids("w2") == ["a"]
    assert await wire.fields("a", "crashes", "attempt") == ["1", "2"]


Act = Callable[[Wire], Awaitable[None]]


@pytest.mark.parametrize("act", [run_finish, run_abort, run_release, run_release_crash])
async def test_what_ends_or_frees_a_job_runs(wire: Wire, full: Full, act: Act) -> None:
    await wire.running(tokens=1)
    async with full():
        await act(wire)


@pytest.mark.parametrize("act", [run_gate_in_emit, run_gate_in_take, run_sweep])
async def test_an_abort_key_works(wire: Wire, full: Full, act: Act) -> None:
    await wire.running(tokens=1)
    await wire.ask_abort()
    async with full():
        await act(wire)


async def test_take_of_a_lapsed_job_runs(wire: Wire, full: Full) -> None:
    await wire.running(tokens=1)
    async with full():
        await run_take_of_a_lapsed_job(wire)


async def test_a_suspect_makes_room(wire: Wire, full: Full) -> None:
    await wire.running()
    await wire.release("w1", "crash", ("a", 1))
    async with full():
        assert (await wire.take("w2")).make_room


async def test_a_dead_job_is_buried(wire: Wire, full: Full) -> None:
    await wire.running()
    await wire.release("w1", "crash", ("a", 1))
    await wire.command("HSET", wire.keys.job("a"), "crashes", 10)
    async with full():
        assert await wire.take_ids("w2") == []
        assert await wire.is_closed()
        assert await wire.client.xlen(wire.keys.dead) == 1


async def test_take_makes_its_groups(wire: Wire, full: Full) -> None:
    await wire.enqueue()
    async with full():
        assert await wire.take_ids() == ["a"]


async def test_sweep_moves_on(wire: Wire, full: Full, keys: Keys) -> None:
    for lane in LANES:
        await wire.enqueue(lane, lane)
    async with full():
        assert [await wire.sweep(2) for _ in range(2)] == [Sweep(2, 0, False), Sweep(1, 0, True)]
