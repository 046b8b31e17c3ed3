"""A submitter that writes nonsense by hand harms its own jobs: no worker stops, no other job fails.

Each case is written as the submitter of ops/redis/users.acl could write it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from mlxq.protocol.keys import Keys
from mlxq.worker.publisher import Publisher
from tests.security.acl import User, command
from tests.security.conftest import TEXT, Connect
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Running, Submitter, check_stream, running, text_of

Load = Callable[[], FakeBatch]
NORMAL = {"state": "queued", "lane": "normal", "attempt": "0", "seq": "0", "tokens": "0"}
NORMAL |= {"created": "1", "deadline": "0", "retention": "60000", "replay": "60000"}
SPEC = {"spec": '{"prompt":"Hi","max_tokens":100}'}
NUMBERS = (
    "-1",
    "-0",
    "1e3",
    "",
    "nan",
    "inf",
    "1e300",
    "0x10",
    "1e15",
    "9" * 40,
    "1.5",
    "x",
    " 1",
    "\x00",
)
SIZES = [
    "attempt", "seq", "tokens", "begun", "lease", "base", "crashes", "strikes", "silent",
    "releases", "deadline", "retention", "replay",
]  # fmt: skip


@pytest.fixture
def mallory(users: dict[str, User], connect: Connect, queue: str) -> Submitter:
    """The raw protocol with the rights of the submitter alone."""
    return Submitter(connect(users["submitter"]), queue)


@pytest.fixture(autouse=True)
def often_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers count what waits ten times a second."""
    monkeypatch.setattr("mlxq.worker.presence.PRESENCE_INTERVAL_S", 0.1)


@pytest.fixture
async def worker(users: dict[str, User], queue: str, load: Load) -> AsyncIterator[Running]:
    url = users["worker"].url
    async with running(load, redis_url=url, queue=queue, lease_s=1.0, max_batch=8) as worker:
        yield worker


PLANT = """
local lane, bell, id = unpack(ARGV)
local entry = redis.call('XADD', lane, '*', 'id', id)
redis.call('HSET', KEYS[1], 'entry', entry, unpack(ARGV, 4))
redis.call('XADD', bell, '*', 'ring', 1)
"""


async def plant(mallory: Submitter, job_id: str | bytes, **fields: str | None) -> None:
    """A job as ENQUEUE would leave it, but for some fields; None leaves one out."""
    keys = mallory.keys
    raw = job_id if isinstance(job_id, bytes) else job_id.encode()
    job_key = f"{keys.tag}:job:".encode() + raw
    written = {**NORMAL, **SPEC, **fields}
    arguments = [
        word for name, value in written.items() if value is not None for word in (name, value)
    ]
    where = (job_key, keys.lane("normal"), keys.bell)
    await command(mallory.client, "EVAL", PLANT, 1, *where, raw, *arguments)


async def serves(worker: Running, submitter: Submitter, job_id: str = "good") -> None:
    """The worker is up and takes and finishes a job as ever."""
    await submitter.enqueue(job_id, prompt="Hi", max_tokens=100)
    await submitter.terminal(job_id)
    events = await submitter.events(job_id)
    check_stream(events)
    assert text_of(events) == TEXT
    assert not worker.exit.done()


BAD_IDS: list[str | bytes] = [
    b"\xff\xfe", b"", "a:b", "x}:job:y", "../up", "a" * 65, "a" * 70_000, "a\nb", "a\x00b", "*",
    "é", " a", "{mlxq:other}:job:a",
]  # fmt: skip


async def test_ids_that_no_submit_would_let_in(
    mallory: Submitter, worker: Running, submitter: Submitter
) -> None:
    for bad in BAD_IDS:
        await plant(mallory, bad)
        await mallory.client.xadd(mallory.keys.lane("high"), {"other": bad})
    await serves(worker, submitter)
    await lanes_are_empty(submitter)


async def lanes_are_empty(submitter: Submitter) -> None:
    async with asyncio.timeout(30):
        for lane in ("high", "normal", "low"):
            while await submitter.client.xlen(submitter.keys.lane(lane)):
                await asyncio.sleep(0.02)


async def test_numbers_that_are_none(
    mallory: Submitter, worker: Running, submitter: Submitter
) -> None:
    for number, value in enumerate(NUMBERS):
        for field in SIZES:
            await plant(mallory, f"{field}-{number}", **{field: value})
    await serves(worker, submitter)
    await lanes_are_empty(submitter)


async def test_a_job_without_a_spec_fails_alone(
    mallory: Submitter, worker: Running, submitter: Submitter
) -> None:
    await plant(mallory, "a", spec=None)
    assert (await submitter.terminal("a"))["code"] == "bad_request"
    await plant(mallory, "b", spec=None, crashes="99")
    assert (await submitter.terminal("b"))["code"] == "worker_lost"
    await serves(worker, submitter)


async def test_a_spec_larger_than_any_queue_takes(
    mallory: Submitter, worker: Running, submitter: Submitter
) -> None:
    """It never reaches the worker: TAKE looks at its length alone."""
    large = b'{"prompt":"' + b"a" * (17 * 2**20) + b'"}'
    assert (await mallory.enqueue("a", large, call={"max_bytes": 2**30})).status == "too_large"
    await plant(mallory, "b", spec=large.decode())
    failed = await submitter.terminal("b")
    assert (failed["code"], "bytes" in failed["message"]) == ("bad_request", True)
    await serves(worker, submitter)


DAMAGE: list[dict[str, str]] = [
    {"state": "queued"}, {"state": "done"}, {"state": "?"}, {"owner": "me.1"}, {"attempt": "7"},
    {"attempt": "x"}, {"lane": "?"}, {"lane": "low"}, {"entry": "?"}, {"entry": "1-1"},
    {"entry": "9" * 30 + "-1"}, {"seq": "0"}, {"seq": "1000"}, {"seq": "x"}, {"tokens": "99"},
    {"deadline": "x"}, {"retention": "0"}, {"retention": "9" * 18, "replay": "9" * 18},
    {"spec": "?"}, {"by": "?"}, {"lease": "999999999"}, {"begun": "x"}, {"crashes": "1000"},
]  # fmt: skip


async def test_a_running_job_is_damaged(
    mallory: Submitter, users: dict[str, User], queue: str, submitter: Submitter, load: Load
) -> None:
    """Whatever becomes of these jobs, a good one beside them streams on and the batch empties."""
    batch = load()
    batch.manual = True
    size = len(DAMAGE) + 1
    url = users["worker"].url
    async with running(
        lambda: batch, redis_url=url, queue=queue, lease_s=1.0, max_batch=size
    ) as worker:
        await mallory.enqueue("good", prompt="Hi", max_tokens=100)
        for number in range(len(DAMAGE)):
            await mallory.enqueue(f"d{number}", prompt="Hi", max_tokens=100)
        for number in range(len(DAMAGE)):
            await submitter.until(f"d{number}")
        batch.allow(3)
        for number, fields in enumerate(DAMAGE):
            await submitter.until(f"d{number}", tokens=1)
            for field, value in fields.items():
                await mallory.client.hset(mallory.keys.job(f"d{number}"), field, value)
        batch.allow(100_000)
        await submitter.terminal("good")
        assert text_of(await submitter.events("good")) == TEXT
        await serves(worker, submitter, "later")
        async with asyncio.timeout(30):
            while batch.rows:
                await asyncio.sleep(0.02)
        await lanes_are_empty(submitter)
        assert await worker.stop() == 0


async def test_a_row_that_can_never_end_does_not_slow_the_flushes(
    mallory: Submitter, worker: Running, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seq from the future makes FINISH report a gap that no repetition closes."""
    unanswered = 0
    flush = Publisher.flush

    async def counting(self: Publisher) -> bool:
        nonlocal unanswered
        complete = await flush(self)
        unanswered += not complete
        return complete

    monkeypatch.setattr(Publisher, "flush", counting)
    for number in range(3):
        await mallory.enqueue(f"d{number}", prompt="Hi", max_tokens=100)
        await submitter.until(f"d{number}")
        await mallory.client.hset(mallory.keys.job(f"d{number}"), "seq", "500")
    for number in range(5):
        await serves(worker, submitter, f"good{number}")
    await lanes_are_empty(submitter)
    assert unanswered <= 6


@pytest.mark.parametrize(
    "event",
    [
        b'{"type":"token","text":"","ids":[1000000]}',
        b'{"type":"token","text":"","ids":[-1]}',
        b'{"type":"token","text":"not what the id says","ids":[5]}',
        b'{"type":"token"',
        b"\xff",
        b"",
    ],
)
async def test_a_transcript_that_no_worker_wrote(
    submitter: Submitter, worker: Running, client: Redis, keys: Keys, event: bytes
) -> None:
    """Nothing of it reaches the engine: the job fails, and may be submitted again."""
    started = b'{"type":"started","attempt":1,"worker":"w","model":"tiny-1","prompt_tokens":1}'
    await client.xadd(keys.events("a"), {"e": started}, "1-1")
    await client.xadd(keys.events("a"), {"e": event}, "1-2")
    await plant(submitter, "a", attempt="1", seq="2", tokens="1")
    async with asyncio.timeout(30):
        while (await submitter.job("a"))["state"] != "failed":
            await asyncio.sleep(0.02)
    failed = json.loads((await submitter.job("a"))["terminal"])
    assert (failed["code"], failed["retryable"]) == ("internal", True)
    await serves(worker, submitter)


async def test_a_key_of_the_wrong_kind_is_no_job(
    worker: Running, submitter: Submitter, client: Redis, keys: Keys
) -> None:
    """The ACL forbids this one to submitters; without an ACL a stray SET must not stop a queue."""
    await client.xadd(keys.lane("normal"), {"id": "a"})
    await client.set(keys.job("a"), "not a hash")
    await serves(worker, submitter)
    await lanes_are_empty(submitter)


async def test_a_lane_of_the_wrong_kind_stops_no_worker(
    worker: Running, submitter: Submitter, client: Redis, keys: Keys
) -> None:
    """TAKE fails while it lasts; the worker stays up, and goes on when the key has gone."""
    await client.set(keys.lane("low"), "not a stream")
    await asyncio.sleep(0.5)  # counted a few times
    assert not worker.exit.done()
    await client.delete(keys.lane("low"))
    await serves(worker, submitter)
