"""What the workers of a queue say of themselves, and how many jobs the queue holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from mlxq.protocol.keys import GROUP, LANES, Keys, Lane


class WorkerStatus(Struct, frozen=True):
    """The `worker:OWNER` hash; fields that a worker did not write are empty or 0.

    running     jobs it holds; more than `slots` while jobs of a higher lane have the slots
    state       serving, or draining: it takes no more jobs
    """

    name: str
    owner: str = ""
    model: str = ""
    version: str = ""
    host: str = ""
    pid: int = 0
    slots: int = 0
    running: int = 0
    state: str = ""
    tokens_per_s: float = 0.0
    jobs_per_s: float = 0.0
    seen_ms: int = 0

    @property
    def free(self) -> int:
        """Slots for new jobs."""
        return 0 if self.draining else max(0, self.slots - self.running)

    @property
    def draining(self) -> bool:
        return self.state == "draining"


class Status(Struct, frozen=True):
    """One queue at `now_ms` of the server's clock.

    jobs        queued and running, by lane
    waiting     those of them that no worker holds
    oldest_s    how long the first of those has waited; 0 if none waits
    """

    queue: str
    now_ms: int
    jobs: dict[Lane, int]
    waiting: int
    oldest_s: float
    dead: int
    workers: list[WorkerStatus]

    @property
    def estimated_wait_s(self) -> float | None:
        """Seconds until a job submitted now begins, at the present rate; None: nothing moves."""
        free = sum(worker.free for worker in self.workers)
        if self.workers and self.waiting < free:
            return 0.0
        rate = sum(worker.jobs_per_s for worker in self.workers if not worker.draining)
        return (self.waiting + 1) / rate if rate > 0 else None


async def read_status(client: Redis, keys: Keys) -> Status:
    """Reads the state of one shard."""
    seconds, microseconds = await client.time()
    now_ms = seconds * 1_000 + microseconds // 1_000
    owners: Any = await client.zrange(keys.workers, 0, -1)
    workers = [
        _worker(owner, fields)
        for owner in (name.decode("utf-8", "replace") for name in owners)
        if (fields := await client.hgetall(keys.worker(owner)))
    ]
    lanes = [await _read_lane(client, keys.lane(lane)) for lane in LANES]
    oldest_ms = min((since for _, _, since in lanes if since), default=now_ms)
    return Status(
        queue=keys.queue,
        now_ms=now_ms,
        jobs={lane: length for lane, (length, _, _) in zip(LANES, lanes, strict=True)},
        waiting=sum(waiting for _, waiting, _ in lanes),
        oldest_s=max(0, now_ms - oldest_ms) / 1_000,
        dead=await client.xlen(keys.dead),
        workers=sorted(workers, key=lambda worker: worker.name),
    )


def merge(queue: str, shards: Sequence[Status]) -> Status:
    """One status of all shards; a worker serves all of them and is in each."""
    workers = {worker.owner or worker.name: worker for shard in shards for worker in shard.workers}
    return Status(
        queue=queue,
        now_ms=max(shard.now_ms for shard in shards),
        jobs={lane: sum(shard.jobs[lane] for shard in shards) for lane in LANES},
        waiting=sum(shard.waiting for shard in shards),
        oldest_s=max(shard.oldest_s for shard in shards),
        dead=sum(shard.dead for shard in shards),
        workers=sorted(workers.values(), key=lambda worker: worker.name),
    )


async def _read_lane(client: Redis, lane: str) -> tuple[int, int, int]:
    """Entries, those that nobody holds, and since when (ms) the first of these waits (0: none)."""
    length: int = await client.xlen(lane)
    delivered, pending = "-", 0
    try:
        groups: Any = await client.xinfo_groups(lane)
    except ResponseError:  # no such lane yet
        groups = []
    for group in groups:
        if group["name"] == GROUP.encode():
            delivered, pending = f"({group['last-delivered-id'].decode()}", group["pending"]
    first: Any = await client.xrange(lane, delivered, "+", count=1)
    since = int(first[0][0].partition(b"-")[0]) if first else 0
    return length, max(0, length - pending), since


def _worker(owner: str, fields: dict[Any, Any]) -> WorkerStatus:
    """Tolerant: what is not of the expected kind counts as not written."""
    values: dict[str, object] = {"name": owner}
    for field in msgspec.structs.fields(WorkerStatus):
        written = fields.get(field.name.encode())
        if written is None:
            continue
        try:
            values[field.name] = msgspec.convert(
                written.decode("utf-8", "replace"), field.type, strict=False
            )
        except msgspec.ValidationError:
            continue
    return msgspec.convert(values, WorkerStatus)
