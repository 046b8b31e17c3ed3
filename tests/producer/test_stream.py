"""What a reader sees: first, late, from a cursor, from another process, several at a time."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from mlxq.producer import (
    BadCursor,
    Done,
    EventId,
    Failed,
    JobFailed,
    Producer,
    Requeued,
    Resumed,
    Started,
    Token,
    UnknownJob,
)
from mlxq.protocol.keys import Keys
from tests.producer.hand import HandWorker
from tests.producer.reading import check_complete, collect, text_of
from tests.server import Server


async def test_a_first_reader_sees_every_event_as_it_comes(
    producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    events = job.events()
    await hand.start()
    assert isinstance(await anext(events), Started)
    for text in ("one", " two", " three"):
        await hand.say(text)
        event = await anext(events)
        assert isinstance(event, Token)
        assert event.text == text
    await hand.finish(".")
    rest = await collect(events)
    assert [type(event) for event in rest] == [Token, Done]


async def test_text_is_what_was_said_without_empty_pieces(
    producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    reading = asyncio.create_task(collect(job))
    await hand.start()
    await hand.say("He", "", "llo")
    await hand.emit(Token(text="hm", ids=[9], channel="reasoning"))
    await hand.finish("", "!")
    assert await reading == ["He", "llo", "!"]


async def test_a_late_reader_sees_the_same_events(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    first = asyncio.create_task(collect(job.events()))
    hand = await worker.take()
    await hand.start()
    await hand.say(*"abcdef")
    late = asyncio.create_task(collect(producer.attach(job.id).events()))
    await hand.say(*"ghi")
    await hand.finish("j")
    very_late = await collect(job.events())
    assert await first == await late == very_late
    check_complete(very_late)
    assert text_of(very_late) == "abcdefghij"


async def test_another_process_attaches_by_the_id_alone(
    producer: Producer, worker: HandWorker, server: Server, queue: str
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("x")
    async with Producer(server.url, queue) as other:
        attached = other.attach(job.id)
        texts = aiter(attached)
        assert await anext(texts) == "x"
        await hand.finish("y")
        assert await collect(texts) == ["y"]
        assert (await attached.result()).text == "xy"


@pytest.mark.parametrize("live", [True, False])
async def test_from_any_cursor_exactly_the_rest(
    live: bool, producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say(*"abc")
    readings = []
    if live:
        readings = [
            asyncio.create_task(collect(job.events(after=f"1-{seq}"))) for seq in range(1, 5)
        ]
        await asyncio.sleep(0)
    await hand.release()
    hand = await worker.take()
    await hand.start()
    await hand.finish("d")
    everything = await collect(job.events(after=None))
    check_complete(everything)
    assert [event.id for event in everything][-4:] == ["1-5", "2-6", "2-7", "2-8"]
    for seen, event in enumerate(everything, 1):
        assert await collect(job.events(after=event.id)) == everything[seen:]
        assert await collect(job.events(after=EventId.parse(event.id))) == everything[seen:]
    for seen, reading in enumerate(readings, 1):
        assert await reading == everything[seen:]


async def test_several_iterators_of_one_job_have_a_place_each(
    producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("a")
    ahead, behind = job.events(), job.events()
    assert [(await anext(ahead)).id for _ in range(2)] == ["1-1", "1-2"]
    assert (await anext(behind)).id == "1-1"
    await hand.finish("b")
    assert [event.id for event in await collect(ahead)] == ["1-3", "1-4"]
    assert [event.id for event in await collect(behind)] == ["1-2", "1-3", "1-4"]


async def test_a_resumed_job_goes_on_without_a_gap(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    hand = await worker.take()
    await hand.start()
    await hand.say("half ")
    await hand.release()
    hand = await worker.take()
    assert hand.attempt == 2
    await hand.start()
    await hand.finish("done")
    events = await reading
    check_complete(events)
    assert [type(event) for event in events] == [Started, Token, Requeued, Resumed, Token, Done]
    assert (await job.result()).attempts == 2


async def test_events_of_a_later_version_are_passed_over(
    producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    hand = await worker.take()
    await hand.start()
    await hand.emit_json(b'{"type":"weather","sky":"blue"}')
    await hand.emit_json(b'{"type":"token","text":"x","ids":[1],"mood":"fine"}')
    await hand.finish()
    events = await reading
    assert [event.id for event in events] == ["1-1", "1-3", "1-4"]
    assert await collect(job.events(after="1-2")) == events[1:]


async def test_a_message_that_is_no_event_does_no_harm(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    hand = await worker.take()
    await hand.start()
    for junk in (b"", b"hello", b"[]", b"{}", b'{"id":"x","type":"token"}', b"\xff"):
        await client.publish(keys.live(job.id), junk)
    # Far ahead, and behind: neither is the next event.
    await client.publish(keys.live(job.id), b'{"id":"1-99","type":"token","text":"!","ids":[1]}')
    await client.publish(keys.live(job.id), b'{"id":"1-1","type":"token","text":"!","ids":[1]}')
    await hand.finish("fine")
    events = await reading
    check_complete(events)
    assert text_of(events) == "fine"


async def test_sharded_channels(
    server: Server, queue: str, client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 3600.0)
    async with Producer(server.url, queue, publish="SPUBLISH") as producer:
        job = await producer.submit(prompt="a")
        events = job.events()
        hand = await HandWorker(client, keys).take()
        hand.publish("SPUBLISH")
        await hand.start()
        await anext(events)
        assert await client.pubsub_shardnumsub(keys.live(job.id)) == [
            (keys.live(job.id).encode(), 1)
        ]
        await hand.say("a")
        await hand.finish("b")
        check_complete(await collect(events), after=1)


async def test_a_failed_job(producer: Producer, worker: HandWorker) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("so far")
    await hand.fail("context_overflow", "too long")
    events = await collect(job.events())
    check_complete(events)
    assert isinstance(events[-1], Failed)
    texts = aiter(job)
    assert await anext(texts) == "so far"
    with pytest.raises(JobFailed, match="too long") as failed:
        await anext(texts)
    assert failed.value.code == "context_overflow"
    with pytest.raises(JobFailed, match="too long"):
        await job.result()


async def test_an_unknown_job(producer: Producer) -> None:
    job = producer.attach("nobody")
    with pytest.raises(UnknownJob):
        await collect(job)
    with pytest.raises(UnknownJob):
        await collect(job.events(after="1-1"))
    with pytest.raises(UnknownJob):
        await job.result()


@pytest.mark.parametrize("after", ["", "1", "1-", "-1", "a-b", "1-2-3", "1-+2", "１-2"])
async def test_a_cursor_that_is_none(after: str, producer: Producer) -> None:
    with pytest.raises(BadCursor):
        producer.attach("any").events(after=after)


@pytest.mark.parametrize("after", ["1-99", "2-3", "9-9"])
@pytest.mark.parametrize("ended", [True, False])
async def test_a_cursor_ahead_of_the_job(
    after: str, ended: bool, producer: Producer, worker: HandWorker
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("a", "b")
    if ended:
        await hand.finish()
    with pytest.raises(BadCursor):
        await collect(job.events(after=after))


async def test_a_long_transcript_comes_in_pages(
    producer: Producer, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxq.producer.stream.PAGE", 10)
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say(*["x"] * 19)
    late = job.events()
    seen = [await anext(late) for _ in range(15)]
    await hand.say(*["y"] * 20)
    await hand.finish()
    events = seen + await collect(late)
    check_complete(events)
    assert text_of(events) == "x" * 19 + "y" * 20
