"""The publisher against the real scripts: gaps, lost tails, ends behind lost replies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from mlxq.protocol.events import Started
from mlxq.protocol.scripts import Scripts, look, run
from mlxq.worker.chat import Tokenizer
from mlxq.worker.link import Link
from mlxq.worker.metrics import Metrics
from mlxq.worker.output import OutputStage
from mlxq.worker.publisher import Publisher
from mlxq.worker.rows import Row, Rows
from tests.server import Server
from tests.worker.harness import Submitter, check_stream

OWNER = "me.1"


class Bench:
    """A publisher with one row of a job that was just taken."""

    def __init__(self, url: str, submitter: Submitter, tokenizer: Tokenizer) -> None:
        self.scripts: Scripts = submitter.scripts
        self.submitter = submitter
        self.tokenizer = tokenizer
        self.gone: list[str] = []
        self.rows = Rows()
        self.link = Link(url, submitter.keys.bell, timeout_s=5.0, on_back=lambda down_s: None)
        self.publisher = Publisher(
            self.link,
            self.scripts,
            OWNER,
            self.rows,
            Metrics(1, lambda: 0),
            lambda row, why: self.gone.append(why),
        )

    async def take(self) -> Row:
        await self.submitter.enqueue("a", prompt="Hi")
        take = await run(self.link.client, self.scripts.take(OWNER, 1, lease_ms=60_000))
        await run(self.link.client, self.scripts.emit(OWNER, [look("a", 1)]))
        row = Row(take.jobs[0])
        started = Started(attempt=1, worker="me", model="m", prompt_tokens=2)
        row.begin(started, OutputStage(self.tokenizer, []), 2)
        row.open()
        self.rows.add(row)
        return row


@pytest.fixture
async def bench(server: Server, submitter: Submitter, tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    made = Bench(server.url, submitter, tokenizer)
    yield made
    await made.link.close()


async def test_one_flush_stores_what_all_rows_have(bench: Bench) -> None:
    row = await bench.take()
    row.add("a", [5])
    assert await bench.publisher.flush()
    assert (row.seq, row.tokens, row.frozen) == (2, 1, [])
    row.add("b", [6])
    row.finish("stop")
    assert await bench.publisher.flush()
    assert bench.gone == ["done"] and not len(bench.rows)
    assert check_stream(await bench.submitter.events("a")) == [5, 6]


async def test_end_behind_lost_replies_is_seen_as_done(bench: Bench, client: Redis) -> None:
    """EMIT and FINISH ran, both replies were lost: the repetition must not say fenced."""
    row = await bench.take()
    row.add("a", [5])
    items = row.outgoing()[:]
    row.finish("stop")
    call = row.finishing(OWNER, bench.scripts)
    assert call is not None
    await run(client, bench.scripts.emit(OWNER, items))
    await run(client, call)
    assert await bench.publisher.flush()
    assert bench.gone == ["done"]


async def test_gap_that_we_still_hold_is_sent_again(bench: Bench, client: Redis) -> None:
    """FINISH arrives before the EMIT it follows: the EMIT is repeated, then FINISH."""
    row = await bench.take()
    row.add("a", [5])
    row.outgoing()
    row.finish("stop")
    call = row.finishing(OWNER, bench.scripts)
    assert call is not None
    assert await run(client, call) == -4
    assert await bench.publisher.flush()
    assert bench.gone == ["done"]
    assert check_stream(await bench.submitter.events("a")) == [5]


async def test_lost_tail_gives_the_job_back(bench: Bench, client: Redis) -> None:
    """A failover forgot stored events: whoever resumes generates them anew."""
    row = await bench.take()
    row.add("a", [5])
    await bench.publisher.flush()
    keys = bench.scripts.keys
    await client.delete(keys.events("a"))
    await client.xadd(keys.events("a"), {"e": '{"type":"started"}'}, id="1-1")
    await client.hset(keys.job("a"), mapping={"seq": 1, "tokens": 0})
    row.add("b", [6])
    assert await bench.publisher.flush()
    assert bench.gone == ["gap"]
    assert (await bench.submitter.job("a"))["state"] == "queued"


async def test_error_reply_leaves_the_events_to_be_sent_again(bench: Bench, client: Redis) -> None:
    row = await bench.take()
    row.add("a", [5])
    keys = bench.scripts.keys
    await client.hdel(keys.job("a"), "begun")  # so that EMIT writes a receipt, and fails at it
    await client.rename(keys.meta, f"{keys.meta}.away")
    await client.set(keys.meta, "not a hash")
    assert not await bench.publisher.flush()
    assert len(row.frozen) == 2 and not bench.gone
    await client.rename(f"{keys.meta}.away", keys.meta)
    assert await bench.publisher.flush()
    assert row.seq == 2
