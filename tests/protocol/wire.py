"""One queue on one server, spoken to as a submitter and as several workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub

from mlxq.protocol.keys import GROUP, LANES, Keys, Lane
from mlxq.protocol.scripts import (
    EmitItem,
    Enqueued,
    PublishCommand,
    ReleaseReason,
    Scripts,
    Sweep,
    Take,
    Taken,
    look,
    run,
)

LEASE_MS = 60_000  # no lease ends by itself within a test: `lapse` ends them
SPEC = b'{"prompt":"Hi"}'
TOKEN = b'{"type":"token","text":" a","ids":[7]}'
DONE_EVENT = b'{"type":"done","finish_reason":"stop","attempts":1}'


class Wire:
    """Script calls with short defaults, and plain reads of what they left behind."""

    def __init__(
        self, client: Redis | RedisCluster, keys: Keys, publish: PublishCommand = "PUBLISH"
    ) -> None:
        self.client: Any = client  # the types of replies are in the reads below
        self.keys = keys
        self.scripts = Scripts(keys, publish)

    # Scripts

    async def enqueue(
        self, job_id: str = "a", lane: Lane = "normal", spec: bytes = SPEC, **options: int
    ) -> Enqueued:
        return await run(self.client, self.scripts.enqueue(job_id, spec, lane=lane, **options))

    async def take(
        self,
        owner: str = "w1",
        n: int = 1,
        *,
        lease_ms: int = LEASE_MS,
        alone: bool = False,
        recover: bool = False,
        lanes: int = len(LANES),
    ) -> Take:
        call = self.scripts.take(
            owner, n, lease_ms=lease_ms, alone=alone, recover=recover, lanes=lanes
        )
        return await run(self.client, call)

    async def take_ids(self, owner: str = "w1", n: int = 1, **options: Any) -> list[str]:
        return [job.id for job in (await self.take(owner, n, **options)).jobs]

    async def emit(self, owner: str, *items: EmitItem) -> list[int]:
        return await run(self.client, self.scripts.emit(owner, items))

    async def look(self, owner: str = "w1", job_id: str = "a", attempt: int = 1) -> int:
        [status] = await self.emit(owner, look(job_id, attempt))
        return status

    async def finish(
        self,
        owner: str = "w1",
        job_id: str = "a",
        attempt: int = 1,
        *events: bytes,
        seq: int = 1,
        tokens: int = 0,
        state: Literal["done", "failed"] = "done",
        result: bytes = b"",
    ) -> int:
        call = self.scripts.finish(
            owner,
            job_id,
            attempt,
            seq=seq,
            tokens=tokens,
            state=state,
            result=result,
            events=events or (DONE_EVENT,),
        )
        return await run(self.client, call)

    async def beat(self, owner: str, *jobs: tuple[str, int]) -> list[int]:
        return await run(self.client, self.scripts.beat(owner, jobs))

    async def release(self, owner: str, reason: ReleaseReason, *jobs: tuple[str, int]) -> list[int]:
        return await run(self.client, self.scripts.release(owner, reason, jobs))

    async def abort(self, job_id: str = "a") -> str:
        return await run(self.client, self.scripts.abort(job_id))

    async def sweep(self, chunk: int = 100) -> Sweep:
        return await run(self.client, self.scripts.sweep(chunk))

    # Shortcuts

    async def running(
        self, job_id: str = "a", owner: str = "w1", *, tokens: int = 0, lane: Lane = "normal"
    ) -> Taken:
        """A new job that `owner` took, acknowledged, and stored `tokens` events of one token."""
        await self.enqueue(job_id, lane)
        [job] = (await self.take(owner)).jobs
        assert job.id == job_id
        items = [EmitItem(job_id, job.attempt, i + 1, i + 1, TOKEN) for i in range(tokens)]
        statuses = await self.emit(owner, look(job_id, job.attempt), *items)
        assert set(statuses) == {1}
        return job

    async def lapse(self, *job_ids: str, idle_ms: int = 2 * LEASE_MS) -> None:
        """The jobs look as if their owner had been silent for `idle_ms`."""
        for job_id in job_ids:
            lane, entry, owner = await self.fields(job_id, "lane", "entry", "owner")
            key = f"{self.keys.tag}:jobs:{lane}"
            await self.client.xclaim(key, GROUP, owner, 0, [entry], idle=idle_ms, justid=True)

    async def crash(self, job_id: str = "a", owner: str = "w1") -> Taken:
        """`owner` takes the one waiting job, alone, acknowledges it and is not heard again."""
        [job] = (await self.take(owner, alone=True)).jobs
        assert job.id == job_id
        assert await self.look(owner, job_id, job.attempt) == 1
        await self.lapse(job_id)
        return job

    async def ask_abort(self, job_id: str = "a") -> None:
        """What a submitter does that may not run ABORT."""
        await self.command("SET", self.keys.abort(job_id), "1", "EX", 3600)

    async def pass_deadline(self, job_id: str = "a") -> None:
        await self.command("HSET", self.keys.job(job_id), "deadline", 1)

    # Reads

    async def command(self, *words: Any) -> Any:
        return await self.client.execute_command(*words)

    async def job(self, job_id: str = "a") -> dict[str, str]:
        fields = await self.client.hgetall(self.keys.job(job_id))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def fields(self, job_id: str, *names: str) -> list[str]:
        job = await self.job(job_id)
        return [job.get(name, "") for name in names]

    async def events(self, job_id: str = "a") -> list[tuple[str, dict[str, Any]]]:
        entries = await self.client.xrange(self.keys.events(job_id))
        return [(entry.decode(), json.loads(fields[b"e"])) for entry, fields in entries]

    async def event_ids(self, job_id: str = "a") -> list[str]:
        return [event_id for event_id, _ in await self.events(job_id)]

    async def queued(self, lane: Lane = "normal") -> list[str]:
        """Job ids of a lane's entries, taken or not."""
        entries = await self.client.xrange(self.keys.lane(lane))
        return [fields[b"id"].decode() for _, fields in entries]

    async def holders(self, lane: Lane = "normal") -> list[tuple[str, int]]:
        """Consumer and idle time in ms of every pending entry of a lane."""
        page = await self.client.xpending_range(self.keys.lane(lane), GROUP, "-", "+", 1000)
        return [(item["consumer"].decode(), item["time_since_delivered"]) for item in page]

    async def is_closed(self, job_id: str = "a") -> bool:
        """Terminal, expiring, without an entry or an abort key."""
        state, terminal, finished, owner = await self.fields(
            job_id, "state", "terminal", "finished", "owner"
        )
        entries = [await self.queued(lane) for lane in LANES]
        return (
            state in ("done", "failed")
            and json.loads(terminal) == (await self.events(job_id))[-1][1]
            and int(finished) > 0
            and owner == ""
            and not any(job_id in lane for lane in entries)
            and not await self.client.exists(self.keys.abort(job_id))
            and await self.client.pttl(self.keys.job(job_id)) > 0
            and await self.client.pttl(self.keys.events(job_id)) > 0
        )

    @asynccontextmanager
    async def listening(self, job_id: str = "a") -> AsyncIterator[PubSub]:
        """A subscription to the job's channel, acknowledged before it is handed over."""
        async with self.client.pubsub() as subscription:
            await subscription.subscribe(self.keys.live(job_id))
            message = await subscription.get_message(timeout=5)
            assert message is not None and message["type"] == "subscribe"
            yield subscription


async def heard(subscription: PubSub, count: int) -> list[bytes]:
    """The next `count` messages, as they are on the wire; fewer if none comes for 5 seconds."""
    messages: list[bytes] = []
    while len(messages) < count:
        message = await subscription.get_message(timeout=5)
        if message is None:
            break
        messages.append(message["data"])
    return messages
