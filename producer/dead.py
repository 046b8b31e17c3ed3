"""The jobs that were given up: each stays in the `dead` stream with its spec and its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis

from mlxq.producer.shard import Shard
from mlxq.protocol.errors import SubmitRefused, UnknownJob
from mlxq.protocol.keys import check_job_id, shard_of
from mlxq.protocol.scripts import run

PAGE = 200


class DeadJob(Struct, frozen=True):
    """One dead letter.

    id      of the job; entry: of its place in the `dead` stream, whose first part is when it
            died, in ms of the server's clock
    owner   the last worker that held it; reason: what it was given up for
    """

    id: str
    entry: str
    spec: str
    crashes: int
    strikes: int
    owner: str
    reason: str

    @property
    def died_ms(self) -> int:
        return int(self.entry.partition("-")[0])


class DeadLetters:
    """Reads and clears the dead letters of a queue. All methods raise ServerUnreachable."""

    def __init__(self, shards: Sequence[Shard], *, timeout_s: float) -> None:
        self._shards = shards
        self._timeout_s = timeout_s

    async def all(self) -> list[DeadJob]:
        """All of them, the oldest first."""
        found = [job for shard in self._shards for job in await self._read(shard)]
        return sorted(found, key=lambda job: job.died_ms)

    async def show(self, job_id: str) -> DeadJob:
        """The latest with this job id. Raises UnknownJob, or BadRequest for a bad id."""
        shard = self._shards[shard_of(check_job_id(job_id), len(self._shards))]
        for job in reversed(await self._read(shard)):
            if job.id == job_id:
                return job
        raise UnknownJob(f"no dead letter of a job {job_id!r}")

    async def requeue(self, job_id: str) -> str:
        """Submits the job again with a clean record, under a new id, and drops the dead letter.

        The new id is ID-rN; doing it again with the same dead letter gives the same job.
        Returns it. Raises UnknownJob, or SubmitRefused; the dead letter then stays.
        """
        job = await self.show(job_id)
        new_id = f"{job.id[:48]}-r{job.died_ms}"[:64]
        shard = self._shards[shard_of(new_id, len(self._shards))]
        call = shard.scripts.enqueue(new_id, job.spec.encode(), cap=0)
        reply = await shard.connections.ask(
            lambda client: run(client, call), allowed_s=self._timeout_s
        )
        if reply.status not in ("ok", "dup"):
            raise SubmitRefused(f"the server refused {new_id}: {reply.status}")
        await self._drop(job)
        return new_id

    async def purge(self) -> int:
        """Drops all dead letters. Returns how many there were."""
        jobs = await self.all()
        for job in jobs:
            await self._drop(job)
        return len(jobs)

    async def _drop(self, job: DeadJob) -> None:
        shard = self._shards[shard_of(job.id, len(self._shards))]

        async def delete(client: Redis) -> None:
            await client.xdel(shard.keys.dead, job.entry)

        await shard.connections.ask(delete, allowed_s=self._timeout_s)

    async def _read(self, shard: Shard) -> list[DeadJob]:
        jobs: list[DeadJob] = []
        start = "-"
        while True:

            async def read(client: Redis, start: str = start) -> Any:
                return await client.xrange(shard.keys.dead, start, "+", count=PAGE)

            page = await shard.connections.ask(read, allowed_s=self._timeout_s)
            jobs += [_dead_job(entry, fields) for entry, fields in page]
            if len(page) < PAGE:
                return jobs
            start = f"({jobs[-1].entry}"


def _dead_job(entry: bytes, fields: dict[bytes, bytes]) -> DeadJob:
    texts = {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for name, value in fields.items()
    }
    return DeadJob(
        id=texts.get("id", ""),
        entry=entry.decode(),
        spec=texts.get("spec", ""),
        crashes=_count(texts.get("crashes")),
        strikes=_count(texts.get("strikes")),
        owner=texts.get("owner", ""),
        reason=texts.get("reason", ""),
    )


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 20 else 0
