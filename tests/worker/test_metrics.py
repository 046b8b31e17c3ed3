"""What Prometheus and `mlxq status` are shown of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import pytest

from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo
from tests.server import Server, free_port
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, running


def read_metrics(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


@pytest.fixture
def fake(info: ModelInfo, tokenizer: Tokenizer) -> Callable[..., FakeBatch]:
    answer = tokenizer.encode_continuation("the quick brown fox")
    return lambda **settings: FakeBatch(info, lambda request: answer, **settings)


async def test_metrics_and_presence_follow_the_jobs(
    server: Server, queue: str, submitter: Submitter, fake: Callable[..., FakeBatch]
) -> None:
    batch, port = fake(manual=True), free_port()
    settings: dict[str, Any] = {"redis_url": server.url, "queue": queue, "name": "mac1"}
    async with running(lambda: batch, **settings, max_batch=2, metrics_port=port):
        for job in ("a", "b", "c"):
            await submitter.enqueue(job, prompt="Hi", max_tokens=200)
        await submitter.until("b")
        batch.allow(3)
        await submitter.until("a", tokens=2)
        await asyncio.sleep(2.5)  # presence is written every two seconds
        found = await asyncio.to_thread(read_metrics, port)
        assert found["mlxq:num_jobs_running"] == 2
        assert found["mlxq:num_jobs_waiting"] == 1
        assert found["mlxq:num_slots"] == 2
        [key] = [key async for key in submitter.client.scan_iter(f"{submitter.keys.tag}:worker:*")]
        presence: Any = await submitter.client.hgetall(key)
        assert (presence[b"name"], presence[b"running"]) == (b"mac1", b"2")
        scores = await submitter.client.zrange(submitter.keys.workers, 0, -1, withscores=True)
        assert scores == [(presence[b"owner"], int(presence[b"seen_ms"]))]
        batch.allow(1000)
        for job in ("a", "b", "c"):
            await submitter.terminal(job)
        await submitter.enqueue("bad", b"{}")
        await submitter.terminal("bad")
        found = await asyncio.to_thread(read_metrics, port)
    tokens = sum([int((await submitter.job(job))["tokens"]) for job in ("a", "b", "c")])
    assert found["mlxq:generation_tokens_total"] == tokens
    assert found["mlxq:prompt_tokens_total"] == sum(len(r.prompt) for r in batch.admitted)
    assert found['mlxq:jobs_ended_total{how="done"}'] == 3
    assert found['mlxq:jobs_ended_total{how="failed"}'] == 1
    assert found["mlxq:time_to_first_token_seconds_count"] == 3
    assert found["mlxq:job_queue_time_seconds_count"] >= 2
    assert found["mlxq:inter_token_latency_seconds_count"] > 0
    assert found["mlxq:publish_batch_events_sum"] > 0
    assert not [k async for k in submitter.client.scan_iter(f"{submitter.keys.tag}:worker*")]


async def test_presence_of_a_dead_worker_goes(
    server: Server, queue: str, submitter: Submitter, fake: Callable[..., FakeBatch]
) -> None:
    """Of one that could not say goodbye: the next that writes drops its name."""
    workers = submitter.keys.workers
    await submitter.client.zadd(workers, {"dead.1": 1_000})
    async with running(fake, redis_url=server.url, queue=queue, name="mac1"):
        while b"dead.1" in (found := await submitter.client.zrange(workers, 0, -1)):
            await asyncio.sleep(0.02)
        assert len(found) == 1
        assert 0 < await submitter.client.ttl(workers) <= 10
