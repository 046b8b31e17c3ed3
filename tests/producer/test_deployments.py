"""The same producer in a cluster and behind a Sentinel, also when the master changes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import ConnectionPool, Redis

from mlxq.producer import Producer
from mlxq.protocol.keys import Keys
from mlxq.protocol.servers import connection_options
from tests.producer.hand import HandWorker
from tests.producer.reading import check_complete, collect, text_of
from tests.server import Server, binary, free_port

SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor m 127.0.0.1 {master} 1
sentinel down-after-milliseconds m 1000
sentinel failover-timeout m 5000
"""


async def ask(port: int, *words: str) -> Any:
    """One command; ConnectionError as long as nobody listens."""
    async with Redis(port=port) as client:
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


async def until_found(found: str, port: int, *words: str) -> None:
    while True:
        try:
            if found in str(await ask(port, *words)):
                return
        except redis.ConnectionError:
            pass
        await asyncio.sleep(0.05)


def client_of(url: str, keys: Keys) -> Redis:
    return Redis.from_pool(ConnectionPool(**connection_options(url, keys.bell)))


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    """Two nodes of a cluster that do not know each other yet."""
    nodes = [Server("--cluster-enabled", "yes").start() for _ in range(2)]
    yield nodes[0], nodes[1]
    for node in nodes:
        node.stop()


async def test_in_a_cluster(pair: tuple[Server, Server], queue: str, keys: Keys) -> None:
    owner, other = pair
    await ask(owner.port, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    await ask(other.port, "CLUSTER", "MEET", "127.0.0.1", str(owner.port))
    for node in pair:
        await until_found("cluster_state:ok", node.port, "CLUSTER", "INFO")
    url = f"redis+cluster://127.0.0.1:{other.port}"
    client = client_of(url, keys)
    async with Producer(url, queue) as producer:
        job = await producer.submit(prompt="a")
        reading = asyncio.create_task(collect(job.events()))
        hand = await HandWorker(client, keys).take()
        hand.publish("SPUBLISH")
        await hand.start()
        await hand.say("a")
        await hand.finish("b")
        events = await reading
        check_complete(events)
        assert (await job.result()).text == text_of(events) == "ab"
    await client.aclose()


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[tuple[int, Server, Server]]:
    """The port of a Sentinel, its master, and a replica."""
    master = Server().start()
    replica = Server("--replicaof", f"127.0.0.1 {master.port}").start()
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(SENTINEL.format(port=port, folder=tmp_path, master=master.port))
    process = subprocess.Popen(
        [binary() or "redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL
    )
    yield port, master, replica
    process.kill()
    process.wait()
    replica.stop()
    master.stop()


@pytest.mark.slow
async def test_a_failover_that_loses_nothing(
    sentinel: tuple[int, Server, Server], queue: str, keys: Keys
) -> None:
    port, master, replica = sentinel
    await until_found("'master_link_status': 'up'", replica.port, "INFO", "replication")
    await until_found(str(replica.port), port, "SENTINEL", "REPLICAS", "m")
    url = f"redis+sentinel://127.0.0.1:{port}/m"
    async with Producer(url, queue) as producer:
        client = client_of(url, keys)
        job = await producer.submit(prompt="a")
        reading = asyncio.create_task(collect(job.events()))
        hand = await HandWorker(client, keys).take()
        await hand.start()
        await hand.say("before ")
        assert await client.wait(1, 0) == 1
        await client.aclose()
        await ask(port, "SENTINEL", "FAILOVER", "m")
        await until_found("'role': 'master'", replica.port, "INFO", "replication")
        await until_found("'role': 'slave'", master.port, "INFO", "replication")
        hand.client = client_of(url, keys)
        second = await producer.submit(prompt="b")
        await hand.finish("after")
        events = await reading
        check_complete(events)
        assert text_of(events) == "before after"
        assert await second.abort() == "aborted"
        assert (await job.result()).text == "before after"
        await hand.client.aclose()
