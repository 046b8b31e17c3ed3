"""A job of a higher lane is not kept waiting by rows of a lower one, and those lose nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import Output
from ops.lib.fault import Faults
from ops.lib.synthetic import SyntheticBatch, Vocabulary, answer, answer_text
from tests.server import Server, free_port
from tests.worker.harness import Submitter, check_stream, running, text_of
from tests.worker.test_metrics import read_metrics

TOKENS = 40


class Stepped(SyntheticBatch):
    """Takes one step per `allow`."""

    def __init__(self, *, max_batch: int, parks: bool = True) -> None:
        super().__init__(Faults(), max_batch=max_batch, step_s=0.0, prefill_step=512, parks=parks)
        self._allowed = threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    @property
    def held(self) -> int:
        return len(self._rows)

    def step(self) -> list[Output]:
        return super().step() if self._allowed.acquire(timeout=0.02) else []


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer(Vocabulary())


@pytest.fixture
def settings(server: Server, queue: str, vocabulary: Tokenizer) -> dict[str, Any]:
    """The lease is so long that no turn for lapsed leases comes."""
    return {
        **{"redis_url": server.url, "queue": queue, "name": "mac1", "lease_s": 3_600.0},
        "load_tokenizer": lambda path: vocabulary,
    }


async def _enqueue(submitter: Submitter, job_id: str, lane: str) -> None:
    await submitter.enqueue(job_id, prompt="Hi", max_tokens=TOKENS, call={"lane": lane})


async def _until_held(batch: Stepped, rows: int) -> None:
    async with asyncio.timeout(30):
        while batch.held < rows:
            await asyncio.sleep(0.005)


async def _check(submitter: Submitter, *job_ids: str) -> None:
    for job_id in job_ids:
        await submitter.terminal(job_id)
        events = await submitter.events(job_id)
        assert check_stream(events) == answer(job_id, TOKENS)
        assert text_of(events) == answer_text(job_id, TOKENS)


async def test_low_jobs_are_parked_for_a_high_one_and_go_on(
    submitter: Submitter, settings: dict[str, Any]
) -> None:
    batch = Stepped(max_batch=2)
    async with running(lambda: batch, **settings, max_batch=2):
        await _enqueue(submitter, "low0", "low")
        await _enqueue(submitter, "low1", "low")
        await _until_held(batch, 2)
        batch.allow(10)
        await submitter.until("low1", tokens=10)
        await _enqueue(submitter, "low2", "low")
        await _enqueue(submitter, "high", "high")
        await _until_held(batch, 3)
        batch.allow(4)
        await submitter.until("high", tokens=4)
        await submitter.until("low0", tokens=14)
        assert (await submitter.job("low1"))["tokens"] == "10"
        assert (await submitter.job("low1"))["state"] == "running"
        assert (await submitter.job("low2"))["state"] == "queued"
        batch.allow(1000)
        await _check(submitter, "low0", "low1", "low2", "high")
    assert [(await submitter.job(job_id))["attempt"] for job_id in ("low1", "high")] == ["1", "1"]


async def test_a_preempted_job_is_given_back_and_goes_on_elsewhere(
    submitter: Submitter, settings: dict[str, Any]
) -> None:
    batch, port = Stepped(max_batch=2, parks=False), free_port()
    async with running(lambda: batch, **settings, max_batch=2, metrics_port=port):
        await _enqueue(submitter, "low0", "low")
        await _enqueue(submitter, "low1", "low")
        await _until_held(batch, 2)
        batch.allow(10)
        await submitter.until("low1", tokens=10)
        await _enqueue(submitter, "high", "high")
        await _until_held(batch, 3)
        batch.allow(1)
        await submitter.until("high", tokens=1)
        while (await submitter.job("low1"))["state"] == "running":
            await asyncio.sleep(0.005)
        assert (await submitter.events("low1"))[-1]["reason"] == "preempt"
        other = Stepped(max_batch=2)
        other.allow(1000)
        async with running(lambda: other, **{**settings, "name": "mac2"}, max_batch=2):
            await _check(submitter, "low1")
        batch.allow(1000)
        await _check(submitter, "low0", "high")
        found = await asyncio.to_thread(read_metrics, port)
    assert found["mlxq:num_preemptions_total"] == 1
    resumed = [e for e in await submitter.events("low1") if e["type"] == "resumed"]
    assert [(event["worker"], event["tokens"]) for event in resumed] == [("mac2", 10)]
    assert (await submitter.job("low1"))["crashes"] == "0"


async def test_a_normal_job_passes_a_low_one_alone(
    submitter: Submitter, settings: dict[str, Any]
) -> None:
    batch = Stepped(max_batch=2)
    async with running(lambda: batch, **settings, max_batch=2):
        await _enqueue(submitter, "low", "low")
        await _enqueue(submitter, "normal0", "normal")
        await _until_held(batch, 2)
        await _enqueue(submitter, "normal1", "normal")
        await _until_held(batch, 3)
        batch.allow(3)
        await submitter.until("normal1", tokens=3)
        assert (await submitter.job("low")).get("tokens", "0") == "0"
        batch.allow(1000)
        await _check(submitter, "low", "normal0", "normal1")
