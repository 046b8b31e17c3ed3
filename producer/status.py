"""What the workers of a queue say of themselves, and how many jobs the queue holds."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from mlxq.protocol.keys import LANES, Keys, Lane

HEADINGS = ("WORKER", "MODEL", "RUNNING", "TOK/S", "HOST", "PID", "VERSION", "SEEN")


class WorkerStatus(Struct, frozen=True):
    """The `worker:NAME` hash; fields that a worker did not write are empty or 0."""

    name: str
    owner: str = ""
    model: str = ""
    version: str = ""
    host: str = ""
    pid: int = 0
    slots: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    seen_ms: int = 0


class Status(Struct, frozen=True):
    """One queue at `now_ms` of the server's clock. `jobs`: queued and running, by lane."""

    queue: str
    now_ms: int
    jobs: dict[Lane, int]
    dead: int
    workers: list[WorkerStatus]

    def table(self) -> str:
        """Text for a terminal."""
        jobs = "  ".join(f"{lane} {self.jobs[lane]}" for lane in LANES)
        lines = [f"queue {self.queue}: {jobs}  (queued + running)  dead {self.dead}"]
        if not self.workers:
            return "\n".join([*lines, "no workers"])
        rows: list[tuple[str, ...]] = [HEADINGS]
        rows += [self._row(worker) for worker in self.workers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _row(self, worker: WorkerStatus) -> tuple[str, ...]:
        seen = f"{max(0, self.now_ms - worker.seen_ms) / 1000:.0f} s ago" if worker.seen_ms else "-"
        return (
            worker.name,
            worker.model or "-",
            f"{worker.running}/{worker.slots}",
            f"{worker.tokens_per_s:.1f}",
            worker.host or "-",
            str(worker.pid or "-"),
            worker.version or "-",
            seen,
        )


async def read_status(client: Redis, keys: Keys) -> Status:
    """Reads the queue's state. It scans the database for the workers' hashes."""
    seconds, microseconds = await client.time()
    prefix = keys.worker("")
    workers = [
        _worker(key.decode().removeprefix(prefix), await client.hgetall(key))
        async for key in client.scan_iter(match=f"{prefix}*", count=1_000)
    ]
    return Status(
        queue=keys.queue,
        now_ms=seconds * 1_000 + microseconds // 1_000,
        jobs={lane: await client.xlen(keys.lane(lane)) for lane in LANES},
        dead=await client.xlen(keys.dead),
        workers=sorted(workers, key=lambda worker: worker.name),
    )


def _worker(name: str, fields: dict[Any, Any]) -> WorkerStatus:
    """Tolerant: what is not of the expected kind counts as not written."""
    values: dict[str, object] = {"name": name}
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
