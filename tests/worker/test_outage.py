"""The worker through a line that loses requests and replies, and a server that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from mlxq.protocol.scripts import script
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo
from mlxq.worker.orders import Order
from tests.proxy import Proxy
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, check_stream, running, text_of

TEXT = "the quick brown fox jumps over the lazy dog " * 6
Fake = Callable[..., FakeBatch]


@pytest.fixture
def fake(info: ModelInfo, tokenizer: Tokenizer) -> Fake:
    answer = tokenizer.encode_continuation(TEXT)

    def make(**settings: object) -> FakeBatch:
        return FakeBatch(info, lambda request: answer, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as running_proxy:
        yield running_proxy


async def _load_scripts(client: Redis) -> None:
    """So that a script is always called by its SHA, which is what the losses look for."""
    for name in ("take", "emit", "finish", "beat", "release", "sweep"):
        await client.script_load(script(name).source)


@pytest.mark.parametrize("what", ["request", "reply"])
@pytest.mark.parametrize("name", ["take", "emit", "finish", "beat", "sweep"])
async def test_a_lost_call_neither_loses_nor_doubles_a_token(
    name: str,
    what: Literal["request", "reply"],
    submitter: Submitter,
    client: Redis,
    proxy: Proxy,
    fake: Fake,
    queue: str,
) -> None:
    await _load_scripts(client)
    sha = script(name).sha.encode()
    for job in ("a", "b"):
        await submitter.enqueue(job, prompt="Hi", max_tokens=400)
    for _ in range(3):
        proxy.lose_reply(sha) if what == "reply" else proxy.lose_request(sha)
    async with running(fake, redis_url=proxy.url, queue=queue, lease_s=2.0):
        for job in ("a", "b"):
            assert (await submitter.terminal(job))["finish_reason"] == "stop"
    for job in ("a", "b"):
        events = await submitter.events(job)
        check_stream(events)
        assert text_of(events) == TEXT


async def test_a_silent_line_is_given_up_and_the_events_are_sent_again(
    submitter: Submitter, client: Redis, proxy: Proxy, fake: Fake, queue: str
) -> None:
    await _load_scripts(client)
    await submitter.enqueue("a", prompt="Hi", max_tokens=400)
    proxy.lose_reply(script("emit").sha.encode(), "silence")
    async with running(fake, redis_url=proxy.url, queue=queue, lease_s=6.0):
        assert (await submitter.terminal("a"))["attempts"] == 1
    events = await submitter.events("a")
    check_stream(events)
    assert text_of(events) == TEXT


async def test_a_lost_release_is_repeated_until_answered(
    submitter: Submitter, client: Redis, proxy: Proxy, fake: Fake, queue: str
) -> None:
    await _load_scripts(client)
    settings = {"redis_url": proxy.url, "queue": queue, "lease_s": 30.0}
    batch = fake(manual=True)
    async with running(lambda: batch, **settings, drain_timeout_s=0) as worker:
        await submitter.enqueue("a", prompt="Hi", max_tokens=400)
        batch.allow(5)
        await submitter.until("a", tokens=5)
        proxy.lose_reply(script("release").sha.encode())
        assert await worker.stop() == 0
    assert (await submitter.job("a"))["state"] == "queued"
    async with running(fake, **settings):
        await submitter.terminal("a")
    events = await submitter.events("a")
    check_stream(events)
    assert [event["type"] for event in events].count("requeued") == 1
    assert text_of(events) == TEXT


@pytest.mark.parametrize("away_s", [0.2, 4.0])
async def test_a_server_that_goes_away_and_comes_back_costs_a_pause(
    away_s: float, fake: Fake, queue: str
) -> None:
    """Shorter than the lease: the worker goes on. Longer: it keeps its jobs all the same, since
    nobody else took them."""
    server = Server("--appendonly", "yes", "--appendfsync", "always").start()
    client = Redis.from_url(server.url, retry=Retry(NoBackoff(), 0))
    submitter = Submitter(client, queue)
    try:
        batch = fake(manual=True)
        async with running(lambda: batch, redis_url=server.url, queue=queue, lease_s=2.0):
            await submitter.enqueue("a", prompt="Hi", max_tokens=400)
            batch.allow(20)
            await submitter.until("a", tokens=20)
            server.kill()
            batch.allow(10)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(server.start)
            await client.connection_pool.disconnect()
            batch.allow(1000)
            assert (await submitter.terminal("a"))["finish_reason"] == "stop"
            await submitter.enqueue("b", prompt="Hi", max_tokens=400)
            await submitter.terminal("b")
        events = await submitter.events("a")
        check_stream(events)
        assert text_of(events) == TEXT
    finally:
        await client.aclose()
        server.stop()


async def test_a_worker_started_before_its_server_serves_once_there_is_one(
    fake: Fake, queue: str
) -> None:
    server = Server()
    async with running(fake, redis_url=server.url, queue=queue, lease_s=2.0):
        await asyncio.sleep(0.5)
        server.start()
        client = Redis.from_url(server.url, retry=Retry(NoBackoff(), 0))
        try:
            submitter = Submitter(client, queue)
            await submitter.enqueue("a", prompt="Hi", max_tokens=400)
            await submitter.terminal("a")
        finally:
            await client.aclose()
    server.stop()


async def test_a_drain_without_a_server_ends_by_itself(
    proxy: Proxy, submitter: Submitter, fake: Fake, queue: str
) -> None:
    batch = fake(manual=True)
    async with running(lambda: batch, redis_url=proxy.url, queue=queue, lease_s=1.0) as worker:
        await submitter.enqueue("a", prompt="Hi", max_tokens=400)
        await submitter.until("a")
        proxy.down = True
        proxy.cut()
        assert await worker.stop(Order.RELEASE) == 0


async def test_no_take_for_half_a_lease_after_a_long_outage(
    submitter: Submitter, proxy: Proxy, fake: Fake, queue: str
) -> None:
    """Owners who lived through the outage must have the chance to renew their leases first."""
    async with running(fake, redis_url=proxy.url, queue=queue, lease_s=4.0):
        await submitter.enqueue("warm", prompt="Hi", max_tokens=400)
        await submitter.terminal("warm")
        proxy.down = True
        proxy.cut()
        await asyncio.sleep(3.0)
        proxy.down = False
        await submitter.enqueue("a", prompt="Hi", max_tokens=400)
        await asyncio.sleep(0.5)
        assert (await submitter.job("a"))["state"] == "queued"
        await submitter.terminal("a")
