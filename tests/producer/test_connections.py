"""Commands of a busy application: neither its own queue nor its stalls are the server's silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from mlxq.producer import MlxqError, Producer, ServerUnreachable
from mlxq.producer.connections import Connections
from mlxq.protocol.keys import Keys
from tests.producer.reading import until
from tests.proxy import Proxy
from tests.server import Server
from tests.stall import stall, stalled

REPLY_S = 1.0


@pytest.fixture
async def connections(proxy: Proxy, keys: Keys) -> AsyncIterator[Connections]:
    """With one connection, so that commands wait for each other."""
    connections = Connections(proxy.url, keys.bell, max_connections=1, socket_timeout_s=REPLY_S)
    yield connections
    await connections.aclose()


class Asked:
    """A PING that counts how often it was begun."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self, client: Redis) -> None:
        self.times += 1
        await client.ping()


async def test_the_wait_for_a_connection_is_not_the_wait_for_a_reply(
    connections: Connections, proxy: Proxy
) -> None:
    """Fails where the clock of the reply starts before there is a connection."""
    proxy.delay_s = REPLY_S / 10
    commands = [Asked() for _ in range(20)]
    await asyncio.gather(*(connections.ask(command) for command in commands))
    assert [command.times for command in commands] == [1] * len(commands)


async def test_the_callers_time_bounds_the_wait_for_a_connection(
    connections: Connections, proxy: Proxy
) -> None:
    await connections.ask(Asked())
    proxy.lose_reply(b"PING", "silence")
    holder = asyncio.create_task(connections.ask(Asked()))
    await until(lambda: proxy.pending_losses == 0)
    late = Asked()
    with pytest.raises(ServerUnreachable):
        await connections.ask(late, allowed_s=REPLY_S / 10)
    assert late.times == 0
    await holder


async def test_closing_ends_those_who_wait_for_a_connection(
    connections: Connections, proxy: Proxy
) -> None:
    await connections.ask(Asked())
    proxy.lose_reply(b"PING", "silence")
    asking = [asyncio.create_task(connections.ask(Asked())) for _ in range(3)]
    await until(lambda: proxy.pending_losses == 0)
    await connections.aclose()
    for each in asking:
        with pytest.raises(MlxqError, match="closed"):
            await each


async def test_a_reply_that_came_while_the_loop_stalled_counts(server: Server, keys: Keys) -> None:
    """Fails with asyncio.timeout in `Connections._try`: the command is sent a second time."""
    connections = Connections(server.url, keys.bell, max_connections=1, socket_timeout_s=REPLY_S)
    await connections.ask(Asked())
    command = Asked()
    await stalled(connections.ask(command, allowed_s=REPLY_S), 2 * REPLY_S)
    assert command.times == 1
    await connections.aclose()


async def test_a_subscription_survives_a_stall(
    server: Server, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails where a loop that has not asked takes its own silence for the server's."""
    monkeypatch.setattr("mlxq.producer.hub.PING_S", 0.2)
    monkeypatch.setattr("mlxq.producer.hub.SILENCE_S", 0.6)
    async with Producer(server.url, queue) as producer:
        await producer.submit(prompt="a")
        for _ in range(3):
            stall(1.0)
            await asyncio.sleep(0.3)
    assert "subscription lost" not in caplog.text
