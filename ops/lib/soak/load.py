"""The submitters and readers of one round: every job as planned, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from mlxq.producer.job import JobHandle
from mlxq.protocol.errors import MlxqError, ServerUnreachable
from mlxq.protocol.events import Event
from mlxq.protocol.scripts import Scripts, run
from ops.lib.soak.plan import JobPlan, ReaderPlan
from ops.lib.soak.world import World


@dataclass
class Reading:
    """One reader: what it was given, in the order it was given."""

    plan: ReaderPlan
    events: list[Event] = field(default_factory=list)
    ended: bool = False
    error: str = ""


@dataclass
class Submitted:
    """One job.

    confirmed   a submit has returned; refused: it raised, and the job may exist or not
    aborted     what `abort` said, or `key` for a bare abort key
    """

    plan: JobPlan
    confirmed: bool = False
    refused: str = ""
    aborted: str = ""
    readings: list[Reading] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether nobody waits for it any more."""
        settled = self.confirmed or bool(self.refused)
        return settled and all(reading.ended for reading in self.readings)


class Load:
    """Runs the jobs of one round."""

    def __init__(self, world: World, plans: Sequence[JobPlan]) -> None:
        self._world = world
        self.jobs = [Submitted(plan) for plan in plans]

    async def run(self) -> None:
        """Returns when all submits, aborts and readers have come to their end."""
        async with asyncio.TaskGroup() as tasks:
            for job in self.jobs:
                tasks.create_task(self._run(job))

    async def _run(self, job: Submitted) -> None:
        plan = job.plan
        await asyncio.sleep(plan.at_s)
        async with asyncio.TaskGroup() as tasks:
            if plan.again is not None:
                tasks.create_task(self._submit_again(job))
            handle = await self._submit(job, plan.producer)
            if handle is None:
                return
            for reader in plan.readers:
                reading = Reading(reader)
                job.readings.append(reading)
                tasks.create_task(self._read(plan, reading, handle))
            if plan.abort_s is not None:
                tasks.create_task(self._abort(job, handle))

    async def _submit_again(self, job: Submitted) -> None:
        """The same job at the same time from another place: it must stay one."""
        assert job.plan.again is not None
        handle = await self._submit(job, job.plan.again)
        if handle is not None:
            reading = Reading(ReaderPlan(job.plan.again))
            job.readings.append(reading)
            await self._read(job.plan, reading, handle)

    async def _submit(self, job: Submitted, producer: int) -> JobHandle | None:
        plan = job.plan
        try:
            handle = await self._world.producers[producer].submit(
                prompt=plan.prompt,
                max_tokens=plan.tokens,
                job_id=plan.id,
                priority=plan.lane,
                deadline_s=plan.deadline_s,
                stop=plan.stop or (),
            )
        except ServerUnreachable as error:
            job.refused = str(error)
            self._world.news.counts["refused submits"] += 1
            await self._withdraw(plan.id)
            return None
        job.confirmed = True
        return handle

    async def _withdraw(self, job_id: str) -> None:
        """The producer tries that too, but no longer than it tried the submit."""
        await asyncio.sleep(2.0)
        abort = Scripts(self._world.keys_of(job_id)).abort(job_id)
        await self._world.insist(lambda: run(self._world.client, abort))

    async def _abort(self, job: Submitted, handle: JobHandle) -> None:
        assert job.plan.abort_s is not None
        await asyncio.sleep(job.plan.abort_s)
        key = self._world.keys_of(job.plan.id).abort(job.plan.id)
        if job.plan.bare_key:
            await self._world.insist(lambda: self._world.client.set(key, 1, ex=600))
            job.aborted = "key"
            return
        while not job.aborted:
            try:
                job.aborted = await handle.abort()
            except ServerUnreachable:
                continue

    async def _read(self, plan: JobPlan, reading: Reading, first: JobHandle) -> None:
        """Follows the job to its end, each time from another place if the reader is restless."""
        reader, handle, visits = reading.plan, first, 0
        await asyncio.sleep(reader.after_s)
        producers = self._world.producers
        if reader.after_s:
            handle = producers[reader.producer].attach(plan.id)
        try:
            while not await self._visit(reading, handle):
                visits += 1
                self._world.news.counts["reader reconnects"] += 1
                handle = producers[(reader.producer + visits) % len(producers)].attach(plan.id)
        except MlxqError as error:
            reading.error = f"{type(error).__name__}: {error}"
        reading.ended = True

    async def _visit(self, reading: Reading, handle: JobHandle) -> bool:
        """Reads on behind the cursor. False: the reader has left."""
        cursor = reading.events[-1].id if reading.events else None
        seen = 0
        async with aclosing(handle.events(after=cursor)) as events:
            async for event in events:
                reading.events.append(event)
                seen += 1
                if seen == reading.plan.leaves:
                    return False
                if reading.plan.pause_s:
                    await asyncio.sleep(reading.plan.pause_s)
        return True
