"""Transcripts that were rewritten, damaged or have expired: told, and never guessed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from mlxq.producer import HistoryRewritten, Producer, ReadError, TranscriptExpired
from mlxq.protocol.events import Token, encode_event
from mlxq.protocol.keys import Keys
from tests.producer.hand import HandWorker
from tests.producer.reading import collect


@pytest.mark.usefixtures("fast_look")
@pytest.mark.parametrize("told_by", ["message 2-4", "message 2-5", "the hash", "the transcript"])
async def test_rewritten_history_is_told_and_never_guessed(
    told_by: str,
    producer: Producer,
    worker: HandWorker,
    client: Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failover loses the last events of the server, which the reader has seen."""
    message_id = told_by.removeprefix("message ").encode()
    if told_by.startswith("message"):
        monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 3600.0)
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say(*"abcd")
    events = job.events()
    assert [(await anext(events)).id for _ in range(5)][-1] == "1-5"
    stored: Any = await client.xrange(keys.events(job.id), count=3)
    await client.delete(keys.events(job.id))
    for entry_id, fields in stored:
        await client.xadd(keys.events(job.id), fields, id=entry_id)
    await client.hset(keys.job(job.id), mapping={"seq": 3, "tokens": 2, "attempt": 2})
    other = encode_event(Token(text="X", ids=[7]))
    if told_by.startswith("message"):
        await client.publish(keys.live(job.id), b'{"id":"%b",%b' % (message_id, other[1:]))
    if told_by == "the transcript":
        await client.xadd(keys.events(job.id), {"e": other}, id="2-4")
        await client.hset(keys.job(job.id), mapping={"seq": 4, "tokens": 3})
    with pytest.raises(HistoryRewritten, match="1-5"):
        await anext(events)


async def test_a_hole_in_the_transcript_is_told(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say(*"abc")
    await client.xdel(keys.events(job.id), "1-3")
    events = producer.attach(job.id).events()
    with pytest.raises(TranscriptExpired):
        await collect(events)


async def test_a_damaged_event_is_told(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.emit_json(b'{"type":"token","text":5}')
    with pytest.raises(ReadError, match="1-2 is damaged"):
        await collect(job.events())


async def test_an_expired_transcript_with_a_result(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.finish("whole")
    await client.delete(keys.events(job.id))
    for after in ("0-0", "1-1"):
        with pytest.raises(TranscriptExpired):
            await collect(job.events(after=after))
    assert await collect(job.events(after="1-3")) == []
    assert [text async for text in job] == ["whole"]
    assert (await job.result()).text == "whole"


async def test_an_expired_transcript_without_a_result(
    producer: Producer, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    assert await job.abort() == "aborted"
    await client.delete(keys.events(job.id))
    with pytest.raises(TranscriptExpired):
        await collect(job)
    with pytest.raises(TranscriptExpired):
        await job.result()


async def test_a_transcript_that_is_gone_while_the_job_runs(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("a")
    await client.delete(keys.events(job.id))
    with pytest.raises(TranscriptExpired):
        await job.result()


@pytest.mark.usefixtures("fast_look")
async def test_a_transcript_that_expires_under_the_reader(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("a")
    texts = aiter(job)
    assert await anext(texts) == "a"
    result = asyncio.create_task(job.result())
    await asyncio.sleep(0.05)
    hand.publish("SPUBLISH")
    await hand.finish("b")
    await client.delete(keys.events(job.id))
    with pytest.raises(TranscriptExpired):
        await anext(texts)
    assert (await result).text == "ab"
