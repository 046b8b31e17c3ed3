"""Fixtures: a producer, a worker moved by hand, a server with a disk, a proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from mlxq.producer import Producer
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import script
from tests.producer.hand import HandWorker
from tests.proxy import Proxy
from tests.server import Server


@pytest.fixture
async def producer(server: Server, queue: str) -> AsyncIterator[Producer]:
    async with Producer(server.url, queue) as producer:
        yield producer


@pytest.fixture
def worker(client: Redis, keys: Keys) -> HandWorker:
    return HandWorker(client, keys)


@pytest.fixture
def durable(server: Server) -> Iterator[Server]:
    """A server of this test's own that forgets nothing when it crashes."""
    own = Server("--appendonly", "yes", "--appendfsync", "always").start()
    yield own
    own.stop()


@pytest.fixture
async def proxy(server: Server, client: Redis) -> AsyncIterator[Proxy]:
    # The server knows the script already, so that the first try of a submit may be the one.
    await client.script_load(script("enqueue").source)
    async with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def fast_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet stream is looked at after a tenth of a second."""
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 0.1)
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MAX_S", 0.2)
