"""The submitter of ops/redis/users.acl: all that a web app needs, and no way to forge an event."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from mlxq.producer import Producer, ServerUnreachable
from mlxq.protocol.events import Failed
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import Call, Scripts, look, run, script
from ops.lib.bootstrap import ROOT
from tests.producer.hand import HandWorker
from tests.security.acl import User, command, rules
from tests.security.conftest import Connect

EVENT = '{"type":"token","text":"forged","ids":[1]}'
RUN_ANY = "return redis.call(unpack(ARGV))"


async def test_submits_streams_and_reads_the_result(
    users: dict[str, User], queue: str, hand: HandWorker
) -> None:
    async with Producer(users["submitter"].url, queue) as producer:
        job = await producer.submit(messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
        held = await hand.take()
        await held.start()
        await held.say("a", "b")
        await held.finish("c")
        assert [text async for text in job] == ["a", "b", "c"]
        assert (await job.result()).text == "abc"
        late = producer.attach(job.id)
        assert "".join([text async for text in late]) == "abc"


async def test_aborts_by_the_key_alone(
    users: dict[str, User], queue: str, hand: HandWorker, client: Redis, keys: Keys
) -> None:
    """The ABORT script would publish; so a worker, or a sweep, does what the key asks for."""
    async with Producer(users["submitter"].url, queue) as producer:
        running = await producer.submit(prompt="a", job_id="running")
        held = await hand.take()
        await held.start()
        queued = await producer.submit(prompt="a", job_id="queued")
        assert [await job.abort() for job in (running, queued)] == ["requested", "requested"]
        assert await held.offer(EVENT.encode()) == [-2]
        await run(client, Scripts(keys).sweep())
        reasons = [(await job.result()).finish_reason for job in (running, queued)]
        assert reasons == ["aborted", "aborted"]
        assert await running.abort() == "finished"
        assert await producer.attach("never").abort() == "unknown"


async def test_sees_the_failure_of_a_job(
    users: dict[str, User], queue: str, hand: HandWorker
) -> None:
    async with Producer(users["submitter"].url, queue) as producer:
        job = await producer.submit(prompt="a")
        await (await hand.take()).fail("bad_request", "no")
        [event] = [event async for event in job.events()]
        assert isinstance(event, Failed)


async def test_status_is_for_the_observer(users: dict[str, User], queue: str) -> None:
    async with Producer(users["submitter"].url, queue, submit_timeout_s=5) as producer:
        with pytest.raises(ServerUnreachable, match="refused by Redis"):
            await producer.status()


def forbidden(keys: Keys, other: Keys, job: str) -> list[tuple[str | int, ...]]:
    """Commands that would forge, destroy, spy or reach elsewhere. `job` runs in this queue."""
    own, lane = keys.job(job), keys.lane("normal")
    return [
        # forge events, or take them away
        ("PUBLISH", keys.live(job), '{"id":"9-9"}'),
        ("SPUBLISH", keys.live(job), '{"id":"9-9"}'),
        ("XADD", keys.events(job), "9-9", "e", EVENT),
        ("XDEL", keys.events(job), "1-1"),
        ("XTRIM", keys.events(job), "MAXLEN", 0),
        ("XSETID", keys.events(job), "9-9"),
        ("DEL", keys.events(job)),
        ("SET", keys.events(job), "x"),
        ("RENAME", keys.events(job), own),
        ("EXPIRE", keys.events(job), 1),
        ("COPY", own, keys.events(job)),
        ("SORT", lane, "STORE", keys.events(job)),
        # turn a hash or a lane into something that stops every TAKE
        ("SET", own, "x"),
        ("SET", lane, "x"),
        ("SET", keys.bell, "x"),
        ("XADD", own, "*", "a", "b"),
        ("HSET", lane, "a", "b"),
        ("SET", keys.abort(job), "x", "GET"),
        # be a worker
        ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", lane, ">"),
        ("XCLAIM", lane, "workers", "me", 0, "1-1"),
        ("XACK", lane, "workers", "1-1"),
        ("XDEL", lane, "1-1"),
        ("XGROUP", "DESTROY", lane, "workers"),
        ("DEL", own),
        ("HDEL", own, "owner"),
        ("HSET", keys.meta, "solo", "me"),
        ("HSET", keys.worker("mac1"), "name", "me"),
        ("XADD", keys.dead, "*", "id", "x"),
        # find the jobs of others
        ("KEYS", "*"),
        ("SCAN", 0),
        ("RANDOMKEY",),
        ("XRANGE", lane, "-", "+"),
        ("XREAD", "STREAMS", lane, "0-0"),
        ("XINFO", "STREAM", lane),
        ("PUBSUB", "CHANNELS"),
        ("PSUBSCRIBE", f"{keys.tag}:live:*"),
        ("MONITOR",),
        # other queues
        ("HGETALL", other.job("a")),
        ("HGET", other.job("a"), "spec"),
        ("HSET", other.job("a"), "state", "done"),
        ("XADD", other.lane("high"), "*", "id", "a"),
        ("XLEN", other.lane("high")),
        ("XRANGE", other.events("a"), "-", "+"),
        ("SET", other.abort("a"), 1),
        ("SUBSCRIBE", other.live("a")),
        ("SSUBSCRIBE", other.live("a")),
        ("PUBLISH", other.live("a"), "x"),
        # the server
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("CONFIG", "SET", "maxmemory", 1),
        ("SCRIPT", "FLUSH"),
        ("SCRIPT", "LOAD", "return 1"),
        ("FUNCTION", "FLUSH"),
        ("ACL", "SETUSER", "me", "+@all"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("SHUTDOWN",),
        ("REPLICAOF", "NO", "ONE"),
        ("MIGRATE", "127.0.0.1", 1, own, 0, 1),
        ("SELECT", 1),
        ("SWAPDB", 0, 1),
        ("INFO",),
        ("SAVE",),
        ("BGREWRITEAOF",),
        ("MODULE", "LIST"),
    ]


async def dump(client: Redis, keys: Keys, other: Keys) -> dict[bytes, bytes]:
    """Everything that both queues hold, as the server would save it."""
    found: list[bytes] = []
    for each in (keys, other):
        found += [key async for key in client.scan_iter(f"{each.tag}*")]
    return {key: await client.dump(key) or b"" for key in found}


async def test_can_neither_forge_nor_spy_nor_reach_another_queue(
    users: dict[str, User], connect: Connect, client: Redis, queue: str, keys: Keys
) -> None:
    """Also from inside EVAL: there, too, the server asks what the user may do."""
    other = Keys(f"{queue}-other")
    for each in (keys, other):
        scripts = Scripts(each)
        await run(client, scripts.enqueue("a", b'{"prompt":"secret"}'))
        [taken] = (await run(client, scripts.take("w.1", 1, lease_ms=60_000))).jobs
        await run(client, scripts.emit("w.1", [look("a", taken.attempt)]))
        await client.xadd(each.events("a"), {"e": EVENT}, "1-1")
    before = await dump(client, keys, other)
    assert len(before) >= 10
    submitter = connect(users["submitter"])
    for words in forbidden(keys, other, "a"):
        with pytest.raises(NoPermissionError):
            await command(submitter, *words)
        with pytest.raises(ResponseError) as refused:
            await command(submitter, "EVAL", RUN_ANY, 1, keys.job("a"), *words)
        # Not there at all, or not for this user: each server words it in its own way.
        reason = str(refused.value)
        assert any(part in reason for part in ("ACL", "user executing", "not allowed")), (
            words,
            reason,
        )
    for foreign in (other.job("a"), keys.events("a"), keys.lane("low"), keys.bell):
        with pytest.raises(NoPermissionError):
            await command(submitter, "EVAL", "return 1", 1, foreign)
    assert await dump(client, keys, other) == before


async def test_no_script_but_submit_runs_to_its_end(
    users: dict[str, User], connect: Connect, client: Redis, keys: Keys
) -> None:
    """The scripts of workers are refused whole: their key, the bell, is none of a submitter's."""
    scripts = Scripts(keys)
    submitter = connect(users["submitter"])
    assert (await run(submitter, scripts.enqueue("a", b"{}"))).status == "ok"
    calls: list[Call[Any]] = [
        scripts.take("me.1", 1, lease_ms=1000),
        scripts.emit("me.1", [look("a", 1)]),
        scripts.beat("me.1", [("a", 1)]),
        scripts.release("me.1", "drain", [("a", 1)]),
        scripts.sweep(),
    ]
    for call in calls:
        with pytest.raises(NoPermissionError):
            await command(submitter, "EVAL", call.script.source, 1, call.key, *call.args)
    # FINISH names a job key; but its events are refused, and DEL comes before them.
    await client.hset(keys.job("a"), mapping={"state": "running", "owner": "me.1", "attempt": 1})
    finish = scripts.finish(
        "me.1", "a", 1, seq=1, tokens=0, state="done", result=b"", events=[EVENT.encode()]
    )
    with pytest.raises(ResponseError):
        await command(submitter, "EVAL", finish.script.source, 1, finish.key, *finish.args)
    assert await client.hget(keys.job("a"), "state") == b"running"
    assert not await client.exists(keys.events("a"))


async def test_a_subscription_needs_the_exact_name(
    users: dict[str, User], connect: Connect, keys: Keys
) -> None:
    submitter = connect(users["submitter"])
    async with submitter.pubsub() as pubsub:
        await pubsub.subscribe(keys.live("a"))
        async with asyncio.timeout(10):
            while await pubsub.get_message(timeout=1) is None:
                pass
        assert pubsub.subscribed


async def test_without_eval(
    users: dict[str, User], connect: Connect, client: Redis, queue: str, keys: Keys, tmp_path: Path
) -> None:
    """With ENQUEUE loaded by the operator, as ops/SECURITY.md says, EVALSHA is enough."""
    user = users["submitter"]
    [selector] = [rule for rule in rules(queue)["submitter"] if "+eval " in rule]
    others = [rule for rule in rules(queue)["submitter"] if rule != selector and rule[0] != "#"]
    narrow = [*others, selector.replace("+eval ", "")]
    await command(client, "ACL", "SETUSER", user.name, "clearselectors", *narrow)
    submitter = connect(user)
    with pytest.raises(NoPermissionError):
        await command(submitter, "EVAL", "return 1", 1, keys.job("a"))
    await client.script_flush()  # other tests have loaded the scripts
    loaded = await _load_as_documented(client, tmp_path)
    assert loaded == script("enqueue").sha
    async with Producer(user.url, queue) as producer:
        job = await producer.submit(prompt="a")
        assert await job.abort() == "requested"
    assert await client.hget(keys.job(job.id), "state") == b"queued"


async def _load_as_documented(client: Redis, folder: Path) -> str:
    port = client.connection_pool.connection_kwargs["port"]
    text = (ROOT / "ops" / "SECURITY.md").read_text()
    write, load = re.findall(r"^  \$ (.*(?:scripts lua|enqueue\.lua))$", text, re.MULTILINE)
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli")
    write = write.replace("python ", f"{sys.executable} ")
    both = f"{write} && {load.replace('redis-cli', f'redis-cli -p {port}')}"
    done = await asyncio.to_thread(
        subprocess.run, both, shell=True, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]
