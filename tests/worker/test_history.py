"""A server that lost its data hands out a job under an attempt that this worker has had before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo, Output, RowKey
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, check_stream, running, text_of

TEXT = "the quick brown fox jumps over the lazy dog"


@dataclass
class LateBatch(FakeBatch):
    """The last output of a cancelled row comes out after the row that follows it is in."""

    late: list[Output] = field(default_factory=list)

    def cancel(self, key: RowKey) -> None:
        if key in self.rows:
            self.late.append(Output(key, [7]))
        super().cancel(key)

    def step(self) -> list[Output]:
        outputs = super().step()
        if outputs:
            outputs, self.late = self.late + outputs, []
        return outputs


async def test_a_late_output_does_not_hit_the_next_row_of_the_same_name(
    server: Server,
    queue: str,
    client: Redis,
    submitter: Submitter,
    info: ModelInfo,
    tokenizer: Tokenizer,
) -> None:
    answer = tokenizer.encode_continuation(TEXT)
    batch = LateBatch(info, lambda request: answer, manual=True)
    settings: dict[str, Any] = {"redis_url": server.url, "queue": queue, "lease_s": 30.0}
    async with running(lambda: batch, **settings):
        await submitter.enqueue("a", prompt="Hi", max_tokens=200)
        batch.allow(5)
        await submitter.until("a", tokens=5)
        await client.delete(*[key async for key in client.scan_iter(f"{submitter.keys.tag}:*")])
        async with asyncio.timeout(30):
            while not batch.late:
                await asyncio.sleep(0.01)
        await submitter.enqueue("a", prompt="Hi", max_tokens=200)
        batch.allow(1_000)
        assert (await submitter.terminal("a"))["attempts"] == 1
    events = await submitter.events("a")
    assert check_stream(events) == list(answer)
    assert text_of(events) == TEXT
