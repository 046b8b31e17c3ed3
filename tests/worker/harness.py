"""A worker inside the test's own loop, on a real server, with a batch of the test's choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from redis.asyncio import Redis

from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import Enqueued, Scripts, run
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import Config
from mlxq.worker.engine.thread import Batch
from mlxq.worker.orders import Order, Orders
from mlxq.worker.service import serve


class Running:
    """A worker that runs in this loop."""

    def __init__(
        self, config: Config, load: Callable[[], Batch], load_tokenizer: Callable[[str], Tokenizer]
    ) -> None:
        self.config = config
        self.orders = Orders()
        self.exit = asyncio.create_task(serve(config, load, self.orders, load_tokenizer))

    async def stop(self, order: Order = Order.DRAIN) -> int:
        """Gives the order and returns the exit code."""
        self.orders.give(order)
        return await asyncio.wait_for(self.exit, 30)


@asynccontextmanager
async def running(load: Callable[[], Batch], **settings: Any) -> AsyncIterator[Running]:
    """A worker of these settings (and `load_tokenizer`); released at the end unless it has ended
    by itself."""
    load_tokenizer = settings.pop("load_tokenizer", Tokenizer.load)
    worker = Running(Config(model="fake", **settings), load, load_tokenizer)
    try:
        yield worker
    finally:
        if not worker.exit.done():
            await worker.stop(Order.RELEASE)


class Submitter:
    """Raw protocol access to one queue: what any language could do."""

    def __init__(self, client: Redis, queue: str) -> None:
        self.client = client
        self.keys = Keys(queue)
        self.scripts = Scripts(self.keys)

    async def enqueue(self, job_id: str, spec: bytes | None = None, **fields: Any) -> Enqueued:
        """Enqueues `spec`, or the JSON of `fields` (queue settings such as lane go in `call`)."""
        call = fields.pop("call", {})
        body = spec if spec is not None else msgspec.json.encode(fields)
        return await run(self.client, self.scripts.enqueue(job_id, body, **call))

    async def abort(self, job_id: str) -> str:
        return await run(self.client, self.scripts.abort(job_id))

    async def job(self, job_id: str) -> dict[str, str]:
        """The job's hash as texts."""
        fields: Any = await self.client.hgetall(self.keys.job(job_id))
        return {name.decode(): value.decode("utf-8", "replace") for name, value in fields.items()}

    async def events(self, job_id: str) -> list[dict[str, Any]]:
        """The transcript: every event with its `id`."""
        entries: Any = await self.client.xrange(self.keys.events(job_id))
        return [{"id": i.decode(), **msgspec.json.decode(fields[b"e"])} for i, fields in entries]

    async def terminal(self, job_id: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """The terminal event, once there is one."""
        async with asyncio.timeout(timeout_s):
            while True:
                if (await self.job(job_id)).get("state") in ("done", "failed"):
                    return (await self.events(job_id))[-1]
                await asyncio.sleep(0.01)

    async def until(self, job_id: str, *, events: int = 1, tokens: int = 0) -> None:
        """Returns once the job has stored so many events and tokens."""
        async with asyncio.timeout(30):
            while True:
                job = await self.job(job_id)
                if int(job.get("seq", 0)) >= events and int(job.get("tokens", 0)) >= tokens:
                    return
                await asyncio.sleep(0.005)


def check_stream(events: list[dict[str, Any]]) -> list[int]:
    """Asserts that a transcript is gapless, ordered and ends once. Returns its token ids."""
    ids = [tuple(map(int, event["id"].split("-"))) for event in events]
    assert [seq for _, seq in ids] == list(range(1, len(ids) + 1))
    assert ids == sorted(ids)
    assert [event["type"] in ("done", "failed") for event in events] == [False] * (
        len(events) - 1
    ) + [True]
    return [token for event in events if event["type"] == "token" for token in event["ids"]]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "token")
