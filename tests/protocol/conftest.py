"""`wire`: a fresh queue on the real server. `fake`: the same on fakeredis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fakeredis import FakeAsyncRedis
from redis.asyncio import Redis

from mlxq.protocol.keys import Keys
from tests.protocol.wire import Wire


@pytest.fixture
def wire(client: Redis, keys: Keys) -> Wire:
    return Wire(client, keys)


@pytest.fixture
async def fake(keys: Keys) -> AsyncIterator[Wire]:
    # RESP3 replies reach Lua as maps in fakeredis, unlike in a server.
    client = FakeAsyncRedis(protocol=2)
    yield Wire(client, keys)
    await client.aclose()
