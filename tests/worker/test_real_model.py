"""The whole path on a real small model: the right answer, and the same answer after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxq.producer import Producer
from mlxq.protocol.events import Started, Token
from ops.lib.model import demo_model
from tests.server import Server
from tests.worker.processes import WorkerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model() -> str:
    return str(demo_model())


def _worker(model: str, server: Server, queue: str, name: str, tmp_path: Path) -> WorkerProcess:
    flags = ("--lease-s", "2", "--max-batch", "4")
    return WorkerProcess(model, server.url, queue, name, tmp_path / f"{name}.log", *flags)


async def test_answers_are_right_and_survive_the_death_of_their_worker(
    model: str, server: Server, queue: str, tmp_path: Path
) -> None:
    countries = ["France", "Germany", "Italy", "Spain"]
    questions = [f"What is the capital of {country}? Answer at length." for country in countries]

    async def submit(producer: Producer, suffix: str) -> list[str]:
        jobs = []
        for number, question in enumerate(questions):
            job = await producer.submit(
                messages=[{"role": "user", "content": question}],
                max_tokens=24,
                temperature=0.0 if number % 2 else 0.8,
                seed=number,
                job_id=f"{countries[number]}-{suffix}",
            )
            jobs.append(job.id)
        return jobs

    async with Producer(server.url, queue=queue) as producer:
        one = _worker(model, server, queue, "one", tmp_path)
        with one, _worker(model, server, queue, "two", tmp_path) as two:
            one.wait_serving()
            calm = [await producer.attach(i).result(300) for i in await submit(producer, "calm")]
            two.wait_serving()
            stormy = [producer.attach(i) for i in await submit(producer, "stormy")]
            serving = await _streaming(producer, stormy[0].id)
            (one if serving == "one" else two).kill()
            results = [await job.result(300) for job in stormy]
    assert max(result.attempts for result in results) > 1
    assert "Berlin" in calm[1].text and "Madrid" in calm[3].text
    assert [result.text for result in results] == [result.text for result in calm]
    assert [result.token_ids for result in results] == [result.token_ids for result in calm]


async def _streaming(producer: Producer, job_id: str, tokens: int = 5) -> str:
    """Returns the name of the worker once the job has shown so many token events."""
    worker, seen = "", 0
    async with asyncio.timeout(120):
        async for event in producer.attach(job_id).events():
            if isinstance(event, Started):
                worker = event.worker
            seen += isinstance(event, Token)
            if seen >= tokens:
                break
    return worker
