"""The same with the real engine, on a tiny random model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlxq.producer import Producer
from mlxq.protocol.events import Done, Event, EventId, Resumed, Token
from tests.chaos.reader import GUARD_S
from tests.engine.tiny import make_tiny_model
from tests.server import Server
from tests.worker.processes import WorkerProcess

FLAGS = ("--lease-s", "0.5", "--max-batch", "4", "--prefill-step", "16")
JOBS: list[dict[str, Any]] = [
    {"prompt": "the fox", "max_tokens": 150, "temperature": 0},
    {"prompt": "rain", "max_tokens": 150, "seed": 7},
    {"prompt": "the lazy dog " * 20, "max_tokens": 100, "seed": 8},
    {"prompt": "the rain in spain " * 15, "max_tokens": 100, "temperature": 0},
]


class Run:
    """All jobs once, and the events of each as they come."""

    def __init__(self, producer: Producer) -> None:
        self.seen: list[list[Event]] = [[] for _ in JOBS]
        self.over = asyncio.gather(
            *(self._follow(producer, *each) for each in zip(JOBS, self.seen, strict=True))
        )

    async def _follow(self, producer: Producer, fields: dict[str, Any], seen: list[Event]) -> None:
        job = await producer.submit(**fields, ignore_eos=True)
        async for event in job.events():
            seen.append(event)

    @property
    def begun(self) -> int:
        """How many token events have come."""
        return sum(isinstance(event, Token) for seen in self.seen for event in seen)

    def ids(self) -> list[list[int]]:
        """The token ids of each job, whose events must be in order and without a gap."""
        for seen in self.seen:
            seqs = [EventId.parse(event.id).seq for event in seen]
            assert seqs == list(range(1, len(seen) + 1))
        return [
            [token for event in seen if isinstance(event, Token) for token in event.ids]
            for seen in self.seen
        ]


@pytest.mark.slow
async def test_killed_with_the_real_engine(server: Server, queue: str, tmp_path: Path) -> None:
    """kill -9 of a worker with the real engine, while some rows prefill and some decode.

    Promise: 1 2. Greedy and seeded answers are those of an undisturbed run. Fails without:
    `Admit.generated`, given as [] by `Bridge._enter` (bridge.py).
    """
    model = str(make_tiny_model(tmp_path / "model"))

    def worker(name: str) -> WorkerProcess:
        return WorkerProcess(model, server.url, queue, name, tmp_path / f"{name}.log", *FLAGS)

    with worker("two") as two:
        async with Producer(server.url, queue) as producer:
            await asyncio.to_thread(two.wait_serving)
            calm = Run(producer)
            await asyncio.wait_for(calm.over, GUARD_S)
            stormy = Run(producer)
            while stormy.begun < 20:
                await asyncio.sleep(0.002)
            two.kill()
            with worker("one"):
                await asyncio.wait_for(stormy.over, GUARD_S)
    assert stormy.ids() == calm.ids()
    assert all(isinstance(seen[-1], Done) for seen in stormy.seen)
    assert any(isinstance(event, Resumed) for seen in stormy.seen for event in seen)
