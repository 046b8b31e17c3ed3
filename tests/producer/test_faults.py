"""Every token once and in order, whatever happens to the connections and the server."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from mlxq.producer import Done, MlxqError, Producer
from mlxq.protocol.keys import Keys
from tests.producer.hand import HandWorker
from tests.producer.reading import check_complete, collect, text_of, until
from tests.proxy import Proxy
from tests.server import Server

FLOOD = b"x" * 65_536


async def subscribers(client: Redis) -> list[str]:
    return [each["id"] for each in await client.client_list(_type="pubsub")]


async def test_killed_subscriptions(producer: Producer, worker: HandWorker, client: Redis) -> None:
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    hand = await worker.take()
    await hand.start()
    for round_ in range(10):
        await hand.say(*f"<{round_}>")
        while not (alive := await subscribers(client)):
            await asyncio.sleep(0.01)
        for each in alive:
            await client.client_kill_filter(_id=each)
        await hand.say("|")
    await hand.finish("end")
    events = await reading
    check_complete(events)
    assert text_of(events) == "".join(f"<{round_}>|" for round_ in range(10)) + "end"


async def test_cut_off_by_the_output_limit(queue: str, keys: Keys, durable: Server) -> None:
    client = Redis.from_url(durable.url)
    await client.config_set("client-output-buffer-limit", "pubsub 65536 65536 0")
    worker = HandWorker(client, keys)
    async with Proxy(durable.port) as proxy, Producer(proxy.url, queue) as producer:
        job = await producer.submit(prompt="a")
        events = job.events()
        hand = await worker.take()
        await hand.start()
        await anext(events)
        proxy.reading.clear()
        while await subscribers(client):
            await hand.say("lost")
            await client.publish(keys.keepalive, FLOOD)
        proxy.reading.set()
        await hand.finish("end")
        rest = await collect(events)
        check_complete(rest, after=1)
        assert text_of(rest) == hand.said
    await client.aclose()


async def test_the_server_crashes_and_comes_back(queue: str, keys: Keys, durable: Server) -> None:
    client = Redis.from_url(durable.url)
    worker = HandWorker(client, keys)
    async with Producer(durable.url, queue) as producer:
        job = await producer.submit(prompt="a")
        reading = asyncio.create_task(collect(job.events()))
        result = asyncio.create_task(job.result())
        hand = await worker.take()
        await hand.start()
        await hand.say("before ")
        await asyncio.to_thread(durable.restart)
        await client.connection_pool.disconnect()
        await hand.say("after ")
        durable.kill()
        await client.connection_pool.disconnect()
        await asyncio.sleep(0.5)
        assert not reading.done()
        await asyncio.to_thread(durable.start)
        await hand.finish("end")
        events = await reading
        check_complete(events)
        assert text_of(events) == (await result).text == "before after end"
    await client.aclose()


async def test_a_connection_that_went_silent_is_given_up(
    proxy: Proxy,
    worker: HandWorker,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxq.producer.hub.PING_S", 0.1)
    monkeypatch.setattr("mlxq.producer.hub.SILENCE_S", 0.4)
    # No look at a quiet stream: only a new subscription can help.
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 3600.0)
    async with Producer(proxy.url, queue) as producer:
        job = await producer.submit(prompt="a")
        reading = asyncio.create_task(collect(job.events()))
        hand = await worker.take()
        await hand.start()
        await asyncio.sleep(0.3)
        proxy.lose_reply(b"PING", "silence")
        await until(lambda: proxy.pending_losses == 0)
        await hand.finish("end")
        events = await reading
    check_complete(events)
    assert text_of(events) == "end"


async def test_pings_keep_a_quiet_connection(
    proxy: Proxy, queue: str, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxq.producer.hub.PING_S", 0.05)
    monkeypatch.setattr("mlxq.producer.hub.SILENCE_S", 0.3)
    async with Producer(proxy.url, queue) as producer:
        await producer.submit(prompt="a")
        before = await subscribers(client)
        await asyncio.sleep(1)
        assert await subscribers(client) == before


@pytest.mark.usefixtures("fast_look")
@pytest.mark.parametrize("last", ["all lost", "terminal alone lost"])
async def test_the_end_is_found_though_its_message_was_lost(
    last: str, producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    result = asyncio.create_task(job.result())
    hand = await worker.take()
    await hand.start()
    await hand.say("a")
    # Published where nobody listens: stored, and not received.
    hand.publish("SPUBLISH")
    if last == "all lost":
        await hand.say("b")
    await hand.finish()
    events = await reading
    check_complete(events)
    assert isinstance(events[-1], Done)
    assert text_of(events) == (await result).text == hand.said


async def test_a_gap_is_filled_from_the_transcript(
    producer: Producer, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 3600.0)
    job = await producer.submit(prompt="a")
    reading = asyncio.create_task(collect(job.events()))
    hand = await worker.take()
    await hand.start()
    hand.publish("SPUBLISH")
    await hand.say("not", " received")
    hand.publish("PUBLISH")
    await hand.finish(", and the rest")
    events = await reading
    check_complete(events)
    assert text_of(events) == "not received, and the rest"


async def test_a_buffer_that_overflows_is_dropped_and_reread(
    server: Server, queue: str, keys: Keys, worker: HandWorker
) -> None:
    async with Producer(server.url, queue, buffer=4) as producer:
        job = await producer.submit(prompt="a")
        hand = await worker.take()
        await hand.start()
        events = job.events()
        await anext(events)
        (feed,) = producer._shards[0].hub._feeds[keys.live(job.id)]
        for _ in range(3):
            await hand.say(*"01234567")
            await until(lambda: feed._dirty)
            assert not feed._messages
            seen = [await anext(events) for _ in range(8)]
            assert text_of(seen) == "01234567"
        await hand.finish("end")
        rest = await collect(events)
        assert text_of(rest) == "end"
        check_complete(rest, after=25)


async def test_commands_that_fail_are_repeated(
    proxy: Proxy, worker: HandWorker, queue: str, keys: Keys
) -> None:
    async with Producer(proxy.url, queue) as producer:
        job = await producer.submit(prompt="a")
        hand = await worker.take()
        await hand.start()
        await hand.finish("fine")
        for command in (b"XRANGE", b"HMGET"):
            proxy.lose_reply(command)
            proxy.lose_request(command)
        assert [text async for text in producer.attach(job.id)] == ["fine"]
        assert (await job.result()).text == "fine"
        assert proxy.pending_losses == 0


async def test_a_key_of_another_type_is_told_at_once(
    producer: Producer, client: Redis, keys: Keys
) -> None:
    """Repeating a command on it would never end."""
    for key in (keys.lane("normal"), keys.job("mine"), keys.events("mine")):
        await client.set(key, "not ours")
    with pytest.raises(MlxqError, match="WRONGTYPE"):
        await producer.submit(prompt="a")
    with pytest.raises(MlxqError, match="WRONGTYPE"):
        await collect(producer.attach("mine").events())
    await client.delete(keys.job("mine"))
    await client.hset(keys.job("mine"), "state", "running")
    with pytest.raises(MlxqError, match=f"damaged: .*{keys.events('mine')}.*WRONGTYPE"):
        await collect(producer.attach("mine").events())
