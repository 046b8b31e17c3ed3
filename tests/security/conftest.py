"""The users of the ACL file on the shared server, a worker's model, and a hand-driven worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from mlxq.protocol.keys import Keys
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo
from tests.producer.hand import HandWorker
from tests.security.acl import User, command, grant
from tests.server import Server
from tests.worker.conftest import (
    info as info,
    submitter as submitter,
    tiny_model as tiny_model,
    tokenizer as tokenizer,
)
from tests.worker.fakes import FakeBatch

TEXT = "the quick brown fox jumps over the lazy dog"
Connect = Callable[[User], Redis]


@pytest.fixture
async def users(server: Server, client: Redis, queue: str) -> AsyncIterator[dict[str, User]]:
    """The three users of this test's queue, by role."""
    granted = await grant(client, server.port, queue)
    yield granted
    await command(client, "ACL", "DELUSER", *(user.name for user in granted.values()))


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Plain connections as a user, without retries."""
    made: list[Redis] = []

    def connect(user: User) -> Redis:
        made.append(Redis.from_url(user.url, retry=Retry(NoBackoff(), 0), driver_info=None))
        return made[-1]

    yield connect
    for connection in made:
        await connection.aclose()


@pytest.fixture
def hand(client: Redis, keys: Keys) -> HandWorker:
    return HandWorker(client, keys)


@pytest.fixture
def load(info: ModelInfo, tokenizer: Tokenizer) -> Callable[[], FakeBatch]:
    """Makes batches that answer every request with TEXT."""
    answer = tokenizer.encode_continuation(TEXT)
    return lambda: FakeBatch(info, lambda request: answer)
