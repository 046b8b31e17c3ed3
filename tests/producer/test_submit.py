"""Submit: what is written, what is refused, and what happens when replies are lost."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

import pytest
from redis.asyncio import Redis

from mlxq.producer import (
    BadRequest,
    Message,
    Producer,
    QueueFull,
    ServerUnreachable,
    TextPart,
    TooLarge,
)
from mlxq.protocol.jobs import Job, decode_job
from mlxq.protocol.keys import LANES, Keys
from mlxq.protocol.scripts import Call, Enqueued, Scripts, run
from tests.producer.hand import HandWorker
from tests.proxy import Proxy
from tests.server import Server, free_port


async def depth(client: Redis, keys: Keys) -> int:
    return sum([await client.xlen(keys.lane(lane)) for lane in LANES])


async def abort_key_is_set(client: Redis, keys: Keys, job_id: str) -> None:
    while not await client.exists(keys.abort(job_id)):
        await asyncio.sleep(0.01)


def test_submit_takes_every_field_of_a_job_with_its_default() -> None:
    parameters = inspect.signature(Producer.submit).parameters
    defaults = Job()
    for name in Job.__struct_fields__:
        default = getattr(defaults, name)
        given = parameters[name].default
        assert given == default or (not given and not default), name


async def test_the_spec_holds_what_was_given(producer: Producer, worker: HandWorker) -> None:
    messages: list[Message | dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        Message(role="user", content=[TextPart("Hi")]),
    ]
    job = await producer.submit(
        messages=messages,
        max_tokens=64,
        temperature=0.7,
        top_p=0.9,
        logit_bias={17: -1.5},
        seed=7,
        stop=("END",),
    )
    hand = await worker.take()
    assert hand.id == job.id
    assert decode_job(hand.spec) == Job(
        messages=[
            Message(role="system", content="Be brief."),
            Message(role="user", content=[TextPart("Hi")]),
        ],
        max_tokens=64,
        temperature=0.7,
        top_p=0.9,
        logit_bias={17: -1.5},
        seed=7,
        stop=["END"],
    )


async def test_prompt_and_token_ids(producer: Producer, worker: HandWorker) -> None:
    await producer.submit(prompt="Once")
    await producer.submit(prompt_token_ids=range(3))
    jobs = [decode_job((await worker.take()).spec) for _ in range(2)]
    assert jobs == [Job(prompt="Once"), Job(prompt_token_ids=[0, 1, 2])]


async def test_the_same_arguments_give_the_same_bytes(
    producer: Producer, worker: HandWorker
) -> None:
    for _ in range(2):
        await producer.submit(prompt="a", temperature=0.5, stop="x", logit_bias={2: 1.0, 1: 2.0})
    first, second = await worker.take(), await worker.take()
    assert first.id != second.id
    assert first.spec == second.spec


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt": ""},
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a", "colour": "red"}]},
        {"messages": [{"role": "user"}]},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "temperature": -1.0},
        {"prompt": "a", "temperature": math.nan},
        {"prompt": "a", "seed": "7"},
        {"prompt": "lone \ud800 surrogate"},
        {"prompt_token_ids": [-1]},
        {"prompt": "a", "job_id": "a/b"},
        {"prompt": "a", "job_id": ""},
        {"prompt": "a", "priority": "urgent"},
        {"prompt": "a", "deadline_s": 0.0},
        {"prompt": "a", "deadline_s": math.nan},
    ],
)
async def test_a_bad_job_is_refused_before_anything_is_sent(
    arguments: dict[str, Any],
) -> None:
    async with Producer(f"redis://127.0.0.1:{free_port()}") as producer:
        with pytest.raises(BadRequest):
            await producer.submit(**arguments)


async def test_a_job_over_the_size_limit(server: Server, queue: str) -> None:
    async with Producer(server.url, queue, max_bytes=300) as producer:
        with pytest.raises(TooLarge):
            await producer.submit(prompt="x" * 300)
        assert (await producer.submit(prompt="x" * 20)).id


async def test_a_job_over_the_size_limit_of_the_server(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = Scripts.enqueue

    def stricter(self: Scripts, *args: Any, **given: Any) -> Call[Enqueued]:
        return enqueue(self, *args, **{**given, "max_bytes": 10})

    monkeypatch.setattr(Scripts, "enqueue", stricter)
    with pytest.raises(TooLarge, match="server"):
        await producer.submit(prompt="x")


async def test_the_queue_is_full(server: Server, queue: str) -> None:
    async with Producer(server.url, queue, cap=2) as producer:
        await producer.submit(prompt="a")
        await producer.submit(prompt="b", priority="high")
        with pytest.raises(QueueFull) as full:
            await producer.submit(prompt="c", job_id="third")
        assert full.value.depth == 2
        # A refusal that was answered at once leaves nothing behind.
        assert await producer.attach("third").abort() == "unknown"


async def test_the_same_id_is_the_same_job(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    first = await producer.submit(prompt="one", job_id="same")
    second = await producer.submit(prompt="two", job_id="same")
    assert first.id == second.id == "same"
    assert await depth(client, keys) == 1
    hand = await worker.take()
    assert decode_job(hand.spec).prompt == "one"
    await hand.finish("done")
    assert [text async for text in second] == ["done"]
    third = await producer.submit(prompt="three", job_id="same")
    assert (await third.result()).text == "done"


async def test_priority_and_deadline(
    producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    await producer.submit(prompt="low", priority="low")
    high = await producer.submit(prompt="high", priority="high", deadline_s=100)
    assert (await worker.take()).id == high.id
    created, deadline = await client.hmget(keys.job(high.id), ["created", "deadline"])
    assert int(deadline or 0) - int(created or 0) == 100_000


@pytest.mark.parametrize("how", ["cut", "silence"])
async def test_a_lost_reply_is_repeated_and_the_job_is_there_once(
    how: Any, proxy: Proxy, worker: HandWorker, client: Redis, keys: Keys, queue: str
) -> None:
    async with Producer(proxy.url, queue, socket_timeout_s=0.5) as producer:
        await producer.submit(prompt="loads the script")
        await (await worker.take()).finish()
        for _ in range(3):
            proxy.lose_reply(b"marker", how)
        job = await producer.submit(prompt="marker")
        assert proxy.pending_losses == 0
        assert await depth(client, keys) == 1
        await (await worker.take()).finish("fine")
        assert (await job.result()).text == "fine"


async def test_a_request_that_never_arrived_is_repeated(
    proxy: Proxy, client: Redis, keys: Keys, queue: str
) -> None:
    async with Producer(proxy.url, queue) as producer:
        proxy.lose_request(b"marker")
        await producer.submit(prompt="marker")
        assert await depth(client, keys) == 1


async def test_full_after_an_unanswered_try_withdraws_the_job(
    proxy: Proxy, client: Redis, keys: Keys, queue: str
) -> None:
    await run(client, Scripts(keys).enqueue("other", b'{"prompt":"a"}'))
    async with Producer(proxy.url, queue, cap=1) as producer:
        proxy.lose_request(b"marker")
        with pytest.raises(QueueFull):
            await producer.submit(prompt="marker", job_id="mine")
        # The first try may still be on its way: it would be born doomed.
        await abort_key_is_set(client, keys, "mine")


async def test_giving_up_aborts_the_job(
    proxy: Proxy, client: Redis, keys: Keys, queue: str
) -> None:
    async with Producer(proxy.url, queue, submit_timeout_s=1.0) as producer:
        for _ in range(100):
            proxy.lose_reply(b"marker")
        with pytest.raises(ServerUnreachable):
            await producer.submit(prompt="marker", job_id="mine")
        assert (await producer.attach("mine").result()).finish_reason == "aborted"
    assert await depth(client, keys) == 0


async def test_a_withdrawal_outlasts_the_time_of_the_submit(
    proxy: Proxy, client: Redis, keys: Keys, queue: str
) -> None:
    timeout_s = 0.2
    async with Producer(proxy.url, queue, submit_timeout_s=timeout_s) as producer:
        await producer.ping()
        for _ in range(100):
            proxy.lose_reply(b"marker")
        with pytest.raises(ServerUnreachable):
            await producer.submit(prompt="marker", job_id="mine")
        proxy.down = True
        proxy.cut()
        await asyncio.sleep(3 * timeout_s)
        assert await client.hget(keys.job("mine"), "state") == b"queued"
        proxy.down = False
        assert (await producer.attach("mine").result()).finish_reason == "aborted"


async def test_a_cancelled_submit_aborts_the_job(
    proxy: Proxy, client: Redis, keys: Keys, queue: str
) -> None:
    async with Producer(proxy.url, queue) as producer:
        await producer.ping()
        proxy.lose_reply(b"marker", "silence")
        submit = asyncio.create_task(producer.submit(prompt="marker", job_id="mine"))
        while not await client.exists(keys.job("mine")):
            await asyncio.sleep(0.01)
        submit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submit
        assert (await producer.attach("mine").result()).finish_reason == "aborted"
