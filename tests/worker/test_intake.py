"""When a worker asks for jobs. The lease is so long that its own turns never come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from mlxq.protocol.scripts import Call, run, script
from mlxq.worker import link
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import Admit, ModelInfo
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, running

Fake = Callable[[], FakeBatch]


@pytest.fixture
def fake(info: ModelInfo, tokenizer: Tokenizer) -> Fake:
    answer = tokenizer.encode_continuation("the fox") * 10_000

    def answer_of(request: Admit) -> list[int]:
        return answer

    roomy = replace(info, context_length=1_000_000)
    return lambda: FakeBatch(roomy, answer_of)


@pytest.fixture
def settings(server: Server, queue: str) -> dict[str, Any]:
    return {"redis_url": server.url, "queue": queue, "name": "mac1", "lease_s": 3_600.0}


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[Call[Any]]:
    """Every TAKE of the worker, as it is sent."""
    sent: list[Call[Any]] = []

    async def observed(client: Redis, call: Call[Any]) -> Any:
        if call.script is script("take"):
            sent.append(call)
        return await run(client, call)

    monkeypatch.setattr(link, "run", observed)
    return sent


async def test_every_slot_that_gets_free_is_filled(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    """The bell has rung for all of them before; take `hungry` out to see them wait."""
    async with running(fake, **settings, max_batch=3):
        await submitter.enqueue("long", prompt="Hi", max_tokens=100_000)
        for number in range(12):
            await submitter.enqueue(f"j{number}", prompt="Hi", max_tokens=3 + number)
        for number in range(12):
            await submitter.terminal(f"j{number}")


async def test_jobs_left_behind_a_suspect_are_taken_next(
    submitter: Submitter, client: Redis, fake: Fake, settings: dict[str, Any]
) -> None:
    """A suspect comes alone, whatever else is on the queue, and nothing rings behind it."""
    await submitter.enqueue("suspect", prompt="Hi", max_tokens=3)
    await client.hset(submitter.keys.job("suspect"), mapping={"strikes": 1, "crashes": 1})
    await submitter.enqueue("other", prompt="Hi", max_tokens=3)
    async with running(fake, **settings, max_batch=4):
        await submitter.terminal("suspect")
        await submitter.terminal("other")


async def test_an_ended_job_is_no_reason_to_ask_when_the_queue_was_empty(
    submitter: Submitter, fake: Fake, settings: dict[str, Any], takes: list[Call[Any]]
) -> None:
    async with running(fake, **settings, max_batch=4):
        await submitter.enqueue("long", prompt="Hi", max_tokens=100_000)
        await submitter.until("long")
        takes.clear()
        for number in range(10):
            await submitter.enqueue(f"j{number}", prompt="Hi", max_tokens=2)
            await submitter.terminal(f"j{number}")
        assert (await submitter.job("long"))["state"] == "running"
        assert 1 <= len(takes) <= 10
