"""One worker with a known batch: the path of a job, abort, drain, failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from mlxq.protocol.keys import shard_names, shard_of
from mlxq.protocol.scripts import Scripts, look, run
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import Admit, ModelInfo, RowKey
from mlxq.worker.orders import Order
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, check_stream, running, text_of

TEXT = "the quick brown fox jumps over the lazy dog and then it naps in the plain"
Fake = Callable[..., FakeBatch]


@pytest.fixture
def fake(info: ModelInfo, tokenizer: Tokenizer) -> Fake:
    """Makes batches that answer every request with TEXT."""
    answer = tokenizer.encode_continuation(TEXT)

    def make(**settings: object) -> FakeBatch:
        return FakeBatch(info, lambda request: answer, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def settings(server: Server, queue: str) -> dict[str, Any]:
    return {"redis_url": server.url, "queue": queue, "name": "mac1", "lease_s": 2.0}


async def test_job_streams_from_started_to_done(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    async with running(fake, **settings):
        await submitter.enqueue("a", prompt="Hi", max_tokens=200)
        terminal = await submitter.terminal("a")
    events = await submitter.events("a")
    ids = check_stream(events)
    assert events[0]["type"] == "started" and events[0]["worker"] == "mac1"
    assert text_of(events) == TEXT
    assert terminal["finish_reason"] == "stop"
    assert terminal["usage"]["completion_tokens"] == len(ids)
    assert terminal["usage"]["prompt_tokens"] == events[0]["prompt_tokens"]
    job = await submitter.job("a")
    assert TEXT in job["result"] and int(job["tokens"]) == len(ids)


async def test_length_ends_after_max_tokens(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    async with running(fake, **settings):
        await submitter.enqueue("a", prompt="Hi", max_tokens=5)
        terminal = await submitter.terminal("a")
    assert terminal["finish_reason"] == "length"
    assert len(check_stream(await submitter.events("a"))) == 5


async def test_stop_string_is_neither_shown_nor_leaked(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    async with running(fake, **settings):
        await submitter.enqueue("a", prompt="Hi", max_tokens=200, stop=["over the", "x naps"])
        terminal = await submitter.terminal("a")
    assert terminal["finish_reason"] == "stop"
    assert text_of(await submitter.events("a")) == TEXT[: TEXT.index("over the")]


async def test_aborted_decoding_job_is_terminal_within_two_steps_and_its_slot_is_taken(
    submitter: Submitter, client: Redis, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, max_batch=1):
        await submitter.enqueue("a", prompt="Hi", max_tokens=200)
        batch.allow(3)
        await submitter.until("a", tokens=1)
        await submitter.enqueue("b", prompt="Hi", max_tokens=200)
        while batch.steps_of.get(RowKey("a", 1), 0) < 3:
            await asyncio.sleep(0.005)
        await client.set(submitter.keys.abort("a"), "1", ex=60)
        batch.allow(2)
        terminal = await submitter.terminal("a")
        assert terminal["finish_reason"] == "aborted"
        assert batch.steps_of[RowKey("a", 1)] <= 5
        batch.allow(1000)
        assert (await submitter.terminal("b"))["finish_reason"] == "stop"
    check_stream(await submitter.events("a"))
    assert text_of(await submitter.events("b")) == TEXT


async def test_queued_job_is_aborted_at_once(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, max_batch=1):
        await submitter.enqueue("a", prompt="Hi")
        await submitter.until("a")
        await submitter.enqueue("b", prompt="Hi")
        assert await submitter.abort("b") == "aborted"
        assert (await submitter.events("b"))[-1]["finish_reason"] == "aborted"
        assert await submitter.abort("b") == "finished"
        assert await submitter.abort("nobody") == "unknown"
        batch.allow(1000)
        await submitter.terminal("a")
    assert text_of(await submitter.events("a")) == TEXT


async def test_bare_abort_key_on_queued_job_is_swept(
    submitter: Submitter, client: Redis, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, max_batch=1):
        await submitter.enqueue("a", prompt="Hi")
        await submitter.until("a")
        await submitter.enqueue("b", prompt="Hi")
        await client.set(submitter.keys.abort("b"), "1", ex=60)
        assert (await submitter.terminal("b"))["finish_reason"] == "aborted"


async def test_prefilling_job_is_aborted_without_a_step(
    submitter: Submitter, client: Redis, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, **settings):
        await submitter.enqueue("a", prompt="Hi")
        await submitter.until("a")
        await client.set(submitter.keys.abort("a"), "1", ex=60)
        assert (await submitter.terminal("a"))["finish_reason"] == "aborted"
        while batch.rows:
            await asyncio.sleep(0.005)
    assert batch.steps_of.get(RowKey("a", 1), 0) == 0


async def test_takes_no_more_jobs_than_slots(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, max_batch=3):
        for number in range(6):
            await submitter.enqueue(f"j{number}", prompt="Hi")
        await submitter.until("j2")
        await asyncio.sleep(0.7)  # longer than a take interval
        states = [(await submitter.job(f"j{number}"))["state"] for number in range(6)]
        assert states == ["running"] * 3 + ["queued"] * 3
        batch.allow(10_000)
        for number in range(6):
            await submitter.terminal(f"j{number}")


async def test_drain_finishes_running_jobs_and_leaves_queued_ones(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, max_batch=1) as worker:
        await submitter.enqueue("a", prompt="Hi")
        await submitter.until("a")
        await submitter.enqueue("b", prompt="Hi")
        worker.orders.on_signal()
        batch.allow(1000)
        assert await asyncio.wait_for(worker.exit, 30) == 0
    assert text_of(await submitter.events("a")) == TEXT
    assert (await submitter.job("b"))["state"] == "queued"
    assert batch.closed


@pytest.mark.parametrize("signals", [1, 2])
async def test_drain_releases_what_does_not_finish_and_another_worker_goes_on_at_once(
    signals: int, submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    patience_s = 0.2 if signals == 1 else 600.0
    async with running(lambda: batch, **settings, drain_timeout_s=patience_s) as worker:
        await submitter.enqueue("a", prompt="Hi", max_tokens=200)
        batch.allow(6)
        await submitter.until("a", tokens=3)
        for _ in range(signals):
            worker.orders.on_signal()
        assert await asyncio.wait_for(worker.exit, 30) == 0
    assert (await submitter.events("a"))[-1]["type"] == "requeued"
    # A lease of a minute: only RELEASE can make the job claimable in time.
    async with running(fake, **{**settings, "name": "mac2", "lease_s": 60.0}):
        await submitter.terminal("a")
    events = await submitter.events("a")
    check_stream(events)
    assert [event["worker"] for event in events if event["type"] == "resumed"] == ["mac2"]
    assert text_of(events) == TEXT


async def test_resumed_job_is_admitted_behind_its_tokens(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    first, second = fake(manual=True), fake()
    async with running(lambda: first, **settings, drain_timeout_s=0) as worker:
        await submitter.enqueue("a", prompt="Hi", max_tokens=200, seed=5)
        first.allow(4)
        await submitter.until("a", tokens=4)
        await worker.stop()
    stored = [token for e in await submitter.events("a") for token in e.get("ids", [])]
    async with running(lambda: second, **settings):
        await submitter.terminal("a")
    [before], [after] = first.admitted, second.admitted
    assert after.generated == stored and len(stored) == 4
    assert (after.prompt, after.sampling, after.max_tokens) == (
        before.prompt,
        before.sampling,
        before.max_tokens,
    )


async def test_other_model_goes_on_from_the_text(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    first, second = fake(manual=True), fake()
    second.info = type(second.info)(
        **{**{n: getattr(second.info, n) for n in second.info.__slots__}, "fingerprint": "other"}
    )
    async with running(lambda: first, **settings, drain_timeout_s=0) as worker:
        await submitter.enqueue("a", prompt="Hi", max_tokens=200, stop="naps in")
        first.allow(9)
        await submitter.until("a", tokens=9)
        await worker.stop()
    async with running(lambda: second, **settings):
        await submitter.terminal("a")
    assert text_of(await submitter.events("a")) == TEXT[: TEXT.index("naps in")]


async def test_engine_failure_gives_the_jobs_back_and_exits_3(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    def burst(rows: list[Admit]) -> None:
        raise RuntimeError("kernel panic")

    async with running(lambda: fake(before_step=burst), **settings) as worker:
        await submitter.enqueue("a", prompt="Hi")
        assert await asyncio.wait_for(worker.exit, 30) == 3
    events = await submitter.events("a")
    assert (events[-1]["type"], events[-1]["reason"]) == ("requeued", "crash")
    async with running(fake, **settings):
        await submitter.terminal("a")
    assert text_of(await submitter.events("a")) == TEXT


async def test_load_failure_exits_3(fake: Fake, settings: dict[str, Any]) -> None:
    def load() -> FakeBatch:
        raise OSError("disk gone")

    async with running(load, **settings) as worker:
        assert await asyncio.wait_for(worker.exit, 30) == 3


async def test_told_to_stop_while_loading_exits_0(fake: Fake, settings: dict[str, Any]) -> None:
    loaded = threading.Event()

    def load() -> FakeBatch:
        loaded.wait(10)
        return fake()

    async with running(load, **settings) as worker:
        await asyncio.sleep(0.05)
        worker.orders.on_signal()
        loaded.set()
        assert await asyncio.wait_for(worker.exit, 30) == 0


async def test_zombie_is_fenced_and_its_rows_leave_the_engine(
    submitter: Submitter, client: Redis, fake: Fake, settings: dict[str, Any]
) -> None:
    """Another owner takes the job behind the worker's back: nothing more of it is stored."""
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, max_batch=1):
        await submitter.enqueue("a", prompt="Hi", max_tokens=200)
        batch.allow(3)
        await submitter.until("a", tokens=3)
        await client.hset(submitter.keys.job("a"), mapping={"owner": "thief.1", "attempt": "2"})
        batch.allow(2)
        while batch.rows:
            await asyncio.sleep(0.005)
    assert all(event["id"].startswith("1-") for event in await submitter.events("a"))


async def test_shards_share_the_slots(
    client: Redis, queue: str, fake: Fake, settings: dict[str, Any]
) -> None:
    batch = fake(manual=True)
    shards = [Submitter(client, name) for name in shard_names(queue, 3)]
    jobs = [(f"j{n}", shards[shard_of(f"j{n}", 3)]) for n in range(12)]
    async with running(lambda: batch, **settings, shards=3, max_batch=4):
        for job_id, shard in jobs:
            await shard.enqueue(job_id, prompt="Hi", max_tokens=200)
        await asyncio.sleep(1.0)
        states = [(await shard.job(job_id))["state"] for job_id, shard in jobs]
        assert sorted(states) == ["queued"] * 8 + ["running"] * 4
        batch.allow(10_000)
        for job_id, shard in jobs:
            await shard.terminal(job_id)
            assert text_of(await shard.events(job_id)) == TEXT
        wrong = shards[1 - min(1, shard_of("stray", 3))]
        await wrong.enqueue("stray", prompt="Hi")
        assert (await wrong.terminal("stray"))["code"] == "bad_request"


async def test_order_only_rises(submitter: Submitter, fake: Fake, settings: dict[str, Any]) -> None:
    async with running(fake, **settings) as worker:
        worker.orders.give(Order.RELEASE)
        worker.orders.give(Order.DRAIN)
        assert worker.orders.order is Order.RELEASE
        assert await asyncio.wait_for(worker.exit, 30) == 0


async def test_suspect_runs_alone_until_its_first_token(
    submitter: Submitter, client: Redis, fake: Fake, settings: dict[str, Any]
) -> None:
    """A job that crashed its worker once is handed out alone; neighbours wait for its token."""
    scripts = Scripts(submitter.keys)
    await submitter.enqueue("bad", prompt="Hi", max_tokens=200)
    take = await run(client, scripts.take("dead.1", 1, lease_ms=2000))
    [taken] = take.jobs
    await run(client, scripts.emit("dead.1", [look(taken.id, taken.attempt)]))
    await run(client, scripts.release("dead.1", "crash", [(taken.id, taken.attempt)]))
    assert (await submitter.job("bad"))["strikes"] == "1"
    batch = fake(manual=True)
    async with running(lambda: batch, **settings):
        await submitter.until("bad")
        await submitter.enqueue("good", prompt="Hi", max_tokens=200)
        await asyncio.sleep(0.3)
        assert (await submitter.job("good"))["state"] == "queued"
        batch.allow(10_000)
        await submitter.terminal("good")
        await submitter.terminal("bad")
