"""The handle: result, abort, closing, and what it costs in connections and subscriptions."""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import aclosing
from typing import Any

import pytest
from redis.asyncio import Redis

from mlxq.producer import Done, MlxqError, Producer, Result
from mlxq.protocol.events import Timings, Token, TokenLogprob, Usage
from mlxq.protocol.jobs import Job
from mlxq.protocol.keys import Keys
from tests.producer.hand import HandWorker
from tests.producer.reading import check_complete, collect, text_of, until
from tests.server import Server


def named(server: Server, name: str) -> str:
    return f"{server.url}?client_name={name}"


async def connections(client: Redis, name: str, kind: str | None = None) -> int:
    listed = await client.client_list(_type=kind)
    return sum(each["name"] == name for each in listed)


async def channels(client: Redis, keys: Keys) -> set[str]:
    found: Any = await client.pubsub_channels(f"{keys.tag}:*")
    return {channel.decode() for channel in found} - {keys.keepalive}


async def test_the_result_is_the_stored_one(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    waiting = asyncio.create_task(job.result())
    hand = await worker.take()
    await hand.start()
    await hand.say("Hel")
    await hand.finish("lo", reason="length")
    expected = Result(
        text="Hello",
        token_ids=[0, 1],
        finish_reason="length",
        usage=Usage(3, 2),
        timings=Timings(),
        attempts=1,
    )
    assert await waiting == await job.result() == expected


async def test_a_result_that_does_not_come_in_time(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    with pytest.raises(TimeoutError):
        await job.result(timeout=0.05)
    await (await worker.take()).finish("late")
    assert (await job.result(timeout=60)).text == "late"


async def test_abort_of_a_queued_job(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    assert await job.abort() == "aborted"
    (done,) = await reading
    assert isinstance(done, Done)
    assert done.finish_reason == "aborted"
    assert await job.abort() == "finished"
    assert await collect(job) == []
    assert await worker.take_all(1) == []


async def test_abort_of_a_running_job_keeps_what_was_said(
    producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("so ", "far")
    texts = aiter(job)
    assert await anext(texts) == "so "
    assert await job.abort() == "aborted"
    assert await collect(texts) == ["far"]
    result = await job.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("so far", [0, 1], "aborted")
    assert (result.attempts, result.usage.completion_tokens) == (1, 2)


async def test_what_a_job_can_say_is_what_submit_takes(
    producer: Producer, worker: HandWorker
) -> None:
    fields: dict[str, Any] = {
        **{"min_tokens": 2, "repetition_context_size": 9, "stop_token_ids": [7]},
        **{"logprobs": True, "top_logprobs": 1, "cache_salt": "tenant"},
    }
    await producer.submit(prompt="a", **fields)
    assert json.loads((await worker.take()).spec).items() >= fields.items()
    taken = set(inspect.signature(Producer.submit).parameters)
    assert set(Job.__struct_fields__) <= taken


async def test_logprobs_of_an_aborted_job_are_those_of_its_events(
    producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a", logprobs=True)
    hand = await worker.take()
    await hand.start()
    entries = [TokenLogprob("a", -0.5), TokenLogprob("b", -1.0)]
    for number, entry in enumerate(entries):
        hand.tokens += 1
        await hand.emit(Token(text=entry.token, ids=[number], logprobs=[entry]))
    await job.abort()
    result = await job.result()
    assert (result.text, result.logprobs) == ("ab", entries)


async def test_abort_of_finished_and_unknown_jobs(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    await (await worker.take()).finish("kept")
    assert await job.abort() == "finished"
    assert (await job.result()).text == "kept"
    assert await producer.attach("nobody").abort() == "unknown"


async def test_many_jobs_share_one_subscription(
    server: Server, queue: str, keys: Keys, client: Redis, worker: HandWorker
) -> None:
    n = 300
    async with Producer(named(server, queue), queue, max_connections=8) as producer:
        jobs = await asyncio.gather(*(producer.submit(prompt=f"{i}") for i in range(n)))
        readings = [asyncio.create_task(collect(job.events())) for job in jobs]
        hands = {hand.id: hand for hand in await worker.take_all(n)}
        assert hands.keys() == {job.id for job in jobs}
        for hand in hands.values():
            await hand.start()
            await hand.say(*hand.id)
        assert await connections(client, queue, "pubsub") == 1
        assert await connections(client, queue) <= 9
        assert len(await channels(client, keys)) == n
        for hand in hands.values():
            await hand.finish()
        for job, events in zip(jobs, await asyncio.gather(*readings), strict=True):
            check_complete(events)
            assert text_of(events) == job.id
        while await channels(client, keys):
            await asyncio.sleep(0.01)
    while await connections(client, queue):
        await asyncio.sleep(0.01)


async def test_a_job_nobody_reads_is_let_go(
    producer: Producer,
    worker: HandWorker,
    client: Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxq.producer.job.LINGER_S", 0.1)
    job = await producer.submit(prompt="a")
    job.events()  # not iterated: it subscribes nothing
    assert await channels(client, keys) == {keys.live(job.id)}
    while await channels(client, keys):
        await asyncio.sleep(0.01)
    reading = asyncio.create_task(collect(job))
    await (await worker.take()).finish("still there")
    assert await reading == ["still there"]


async def test_a_reader_that_stops_early_leaves(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("a")
    async with aclosing(job.events()) as events:
        async for _ in events:
            break
    while await channels(client, keys):
        await asyncio.sleep(0.01)
    async for text in job:
        assert text == "a"
        break
    while await channels(client, keys):
        await asyncio.sleep(0.01)


async def test_the_channel_stays_while_one_reader_is_left(
    producer: Producer, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 3600.0)
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    stays = job.events()
    await anext(stays)
    for _ in range(20):
        # Joins and leaves faster than the hub can tell the server.
        leaves = job.events()
        await anext(leaves)
        await leaves.aclose()
    await hand.finish("end")
    check_complete(await collect(stays), after=1)
    late = asyncio.create_task(collect(job.events()))
    check_complete(await late)


async def test_closing_ends_those_who_wait(
    server: Server, queue: str, client: Redis, worker: HandWorker
) -> None:
    before = asyncio.all_tasks()
    async with Producer(named(server, queue), queue) as producer:
        job = await producer.submit(prompt="a")
        hand = await worker.take()
        await hand.start()
        waiting = [
            asyncio.create_task(collect(job)),
            asyncio.create_task(collect(job.events())),
            asyncio.create_task(job.result()),
        ]
        begun = job.events()
        await anext(begun)
        await asyncio.sleep(0.05)
    for each in waiting:
        with pytest.raises(MlxqError, match="closed"):
            await each
    with pytest.raises(MlxqError, match="closed"):
        await anext(begun)
    with pytest.raises(MlxqError, match="closed"):
        await producer.submit(prompt="b")
    with pytest.raises(MlxqError, match="closed"):
        await job.result()
    await producer.aclose()
    while await connections(client, queue):
        await asyncio.sleep(0.01)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_closing_while_the_server_is_away(queue: str, durable: Server, keys: Keys) -> None:
    producer = Producer(durable.url, queue)
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job))
    submitting = asyncio.create_task(producer.submit(prompt="b"))
    durable.kill()
    await asyncio.sleep(0.3)
    await producer.aclose()
    for each in (reading, submitting):
        with pytest.raises(MlxqError):
            await each


async def test_a_producer_that_did_nothing_closes() -> None:
    async with Producer("redis://127.0.0.1:1"):
        pass
