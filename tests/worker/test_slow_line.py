"""A worker whose line to the server is slow: it keeps its leases, or it takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo
from tests.proxy import Proxy
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, check_stream, running, text_of

TEXT = "the quick brown fox jumps over the lazy dog " * 6
LEASE_S = 1.2
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


async def test_replies_slower_than_the_time_between_beats_cost_no_lease(
    submitter: Submitter, server: Server, proxy: Proxy, fake: Fake, queue: str
) -> None:
    """Fails where a beat has only a quarter of a lease: each gives up its connection, and the
    next comes no further than the connection's own greetings."""
    batch = fake(manual=True)
    settings = {"queue": queue, "lease_s": LEASE_S}
    async with running(lambda: batch, redis_url=proxy.url, **settings):
        await submitter.enqueue("a", prompt="Hi", max_tokens=400)
        batch.allow(5)
        await submitter.until("a", tokens=5)
        proxy.delay_s = LEASE_S * 0.3
        async with running(fake, redis_url=server.url, **settings):
            await asyncio.sleep(3 * LEASE_S)
            batch.allow(1_000)
            assert (await submitter.terminal("a"))["attempts"] == 1
    events = await submitter.events("a")
    check_stream(events)
    assert text_of(events) == TEXT


async def test_a_worker_that_cannot_keep_a_lease_takes_nothing(
    submitter: Submitter, proxy: Proxy, fake: Fake, queue: str
) -> None:
    """Else every job it takes lapses, and a lapse is held against the job. Fails without the
    look at the age of the last beat in `Intake._may_take`, for an empty worker too."""
    settings = {"queue": queue, "lease_s": LEASE_S}
    async with running(fake, redis_url=proxy.url, **settings):
        await submitter.enqueue("a", prompt="Hi", max_tokens=400)
        await submitter.terminal("a")
        proxy.delay_s = LEASE_S * 0.7  # a TAKE is still answered in time, a beat is not
        await asyncio.sleep(2 * LEASE_S)
        await submitter.enqueue("b", prompt="Hi", max_tokens=400)
        await asyncio.sleep(3 * LEASE_S)
        assert (await submitter.job("b"))["state"] == "queued"
        assert (await submitter.job("b"))["attempt"] == "0"
        proxy.delay_s = 0.0
        assert (await submitter.terminal("b"))["attempts"] == 1
