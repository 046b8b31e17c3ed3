"""RESP2 and RESP3 clients, a cluster with sharded channels, and an ACL for submitters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import NoPermissionError

from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import DONE, REPEATED, EmitItem, Enqueued, look, run_all
from tests.protocol.wire import DONE_EVENT, SPEC, TOKEN, Wire, heard
from tests.server import Server, free_port


async def one_job_through_everything(wire: Wire) -> None:
    """All eight scripts, each on its ordinary path."""
    assert await wire.enqueue("a") == Enqueued("ok", "queued")
    assert await wire.enqueue("b", "low") == Enqueued("ok", "queued")
    [job] = (await wire.take("w1")).jobs
    assert (job.id, job.attempt, job.spec) == ("a", 1, SPEC)
    assert await wire.emit("w1", look("a", 1), EmitItem("a", 1, 1, 1, TOKEN)) == [DONE, DONE]
    assert await wire.beat("w1", ("a", 1)) == [DONE]
    assert await wire.release("w1", "drain", ("a", 1)) == [DONE]
    [job] = (await wire.take("w2", alone=True, recover=True)).jobs
    assert (job.id, job.attempt, job.seq) == ("a", 2, 2)
    assert await wire.finish("w2", "a", 2, TOKEN, DONE_EVENT, seq=3, tokens=2) == DONE
    assert await wire.finish("w2", "a", 2, TOKEN, DONE_EVENT, seq=3, tokens=2) == REPEATED
    assert await wire.event_ids("a") == ["1-1", "1-2", "2-3", "2-4"]
    assert await wire.abort("b") == "aborted"
    assert (await wire.sweep()).wrapped


@pytest.mark.parametrize("protocol", [2, 3])
async def test_both_protocol_versions(server: Server, keys: Keys, protocol: int) -> None:
    client = Redis.from_url(server.url, retry=Retry(NoBackoff(), 0), protocol=protocol)
    await one_job_through_everything(Wire(client, keys))
    await client.aclose()


async def test_every_key_lies_in_one_slot(wire: Wire) -> None:
    await wire.running("dead", tokens=1)
    await wire.lapse("dead")
    await wire.command("HSET", wire.keys.job("dead"), "crashes", 10)
    await wire.take("w2")
    await wire.abort("unknown")
    await one_job_through_everything(wire)
    found = await wire.client.keys(f"*{wire.keys.queue}*")
    assert len(found) > 8
    assert {key_slot(key) for key in found} == {key_slot(wire.keys.bell.encode())}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    """One node that owns every slot: scripts meet the cluster's rules for keys."""
    running = Server("--cluster-enabled", "yes", "--cluster-port", str(free_port())).start()
    yield running
    running.stop()


@pytest.fixture
async def node(cluster: Server) -> AsyncIterator[Any]:
    client = Redis.from_url(cluster.url, retry=Retry(NoBackoff(), 0))
    command: Any = client.execute_command
    if (await command("CLUSTER INFO"))["cluster_slots_assigned"] == "0":
        await command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    while (await command("CLUSTER INFO"))["cluster_state"] != "ok":
        await asyncio.sleep(0.05)
    yield client
    await client.aclose()


async def test_cluster_with_sharded_channels(cluster: Server, node: Any, keys: Keys) -> None:
    client = RedisCluster.from_url(cluster.url)
    wire = Wire(client, keys, publish="SPUBLISH")
    async with node.pubsub() as subscription:
        await subscription.execute_command("SSUBSCRIBE", keys.live("a"))
        message = await subscription.get_message(timeout=5)
        assert message is not None and message["type"] == "ssubscribe"
        await one_job_through_everything(wire)
        ids = [json.loads(data)["id"] for data in await heard(subscription, 4)]
        assert ids == ["1-1", "1-2", "2-3", "2-4"]
    await client.aclose()


SUBMITTER = (
    "+@connection +eval +evalsha +subscribe +ssubscribe +xrange +hget +hmget "
    "+hset +xadd +xlen +set +time"
)


@pytest.fixture
async def submitter(server: Server, client: Redis, keys: Keys) -> AsyncIterator[Redis]:
    """A user with the rights that the contract gives a submitter, and no others."""
    name = f"u{keys.queue}"
    tag = keys.tag
    rules = [f"%RW~{tag}:{part}" for part in ("job:*", "jobs:*", "bell", "abort:*")]
    rules += [f"%R~{tag}:events:*", f"&{tag}:live:*", *SUBMITTER.split()]
    command: Any = client.execute_command
    await command("ACL", "SETUSER", name, "reset", "on", ">secret", *rules)
    connection = Redis.from_url(
        server.url, retry=Retry(NoBackoff(), 0), username=name, password="secret"
    )
    yield connection
    await connection.aclose()
    await command("ACL", "DELUSER", name)


async def test_a_submitter_under_its_acl(submitter: Redis, wire: Wire) -> None:
    restricted = Wire(submitter, wire.keys)
    assert await restricted.enqueue("a") == Enqueued("ok", "queued")
    assert await restricted.enqueue("a") == Enqueued("dup", "queued")
    assert await restricted.enqueue("b", cap=1) == Enqueued("full", "1")
    async with restricted.listening() as subscription:
        await wire.take()
        await wire.emit("w1", EmitItem("a", 1, 1, 1, TOKEN))
        assert len(await heard(subscription, 1)) == 1
    assert await restricted.event_ids() == ["1-1"]
    assert await restricted.client.hmget(wire.keys.job("a"), "state", "seq") == [b"running", b"1"]
    await restricted.ask_abort()
    assert await wire.look() == -2


async def test_a_submitter_cannot_write_a_transcript(submitter: Redis, wire: Wire) -> None:
    restricted = Wire(submitter, wire.keys)
    await wire.running()
    with pytest.raises(NoPermissionError):
        await restricted.command("XADD", wire.keys.events("a"), "*", "e", "{}")
    with pytest.raises(NoPermissionError):
        await restricted.command("PUBLISH", wire.keys.live("a"), "{}")
    with pytest.raises(Exception, match="(?i)permission|can.t run this command"):
        await restricted.emit("w1", EmitItem("a", 1, 1, 1, TOKEN))
    with pytest.raises(NoPermissionError):
        await restricted.command("HSET", "{mlxq:other}:job:a", "state", "done")
    assert await wire.events() == []


async def test_many_calls_in_one_round_trip(wire: Wire) -> None:
    """Scripts that the server does not know are given to it; an error is one of the answers."""
    await wire.command("SCRIPT", "FLUSH")
    await wire.command("SET", wire.keys.job("bad"), "not a hash")
    calls = [wire.scripts.enqueue(job_id, SPEC) for job_id in ("a", "bad", "b", "a")]
    first, error, *rest = await run_all(wire.client, calls)
    assert first == Enqueued("ok", "queued")
    assert isinstance(error, Exception) and "WRONGTYPE" in str(error)
    assert rest == [Enqueued("ok", "queued"), Enqueued("dup", "queued")]
