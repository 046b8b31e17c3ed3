"""After the faults: every job ends, every reader reads its end, and no worker idles beside work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from ops.lib.soak.fleet import MAX_BATCH
from ops.lib.soak.load import Submitted
from ops.lib.soak.news import Violation
from ops.lib.soak.world import World

SETTLE_S = 120.0  # a hang guard: readers on a dead line look every 15 s, suspects run one by one
IDLE_LEASES = 12  # as long a free slot and a waiting job may be side by side
POLL_S = 0.25


class Watch:
    """Who waits and who is free, from look to look."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting_s: dict[str, float] = {}
        self._free_s: dict[str, float] = {}

    async def look(self, job_ids: Sequence[str]) -> None:
        """Raises Violation if a job has long waited while a worker has long had a free slot.

        Not counted: suspects, which wait for an empty worker, and workers that run one or make
        room for one.
        """
        world, now_s = self._world, time.monotonic()
        owners = await self._owners()
        pipeline = world.client.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.hmget(world.keys_of(job_id).job(job_id), ["state", "owner", "strikes"])
        for keys in world.shards:
            pipeline.hget(keys.meta, "solo")
        replies = await pipeline.execute()
        jobs = replies[: len(job_ids)]
        held: dict[bytes, int] = dict.fromkeys(owners, 0)
        occupied = set(replies[len(job_ids) :])
        waiting = set()
        for job_id, (state, owner, strikes) in zip(job_ids, jobs, strict=True):
            suspect = int(strikes or 0) > 0
            if owner in held:
                held[owner] += 1
                if suspect:
                    occupied.add(owner)
            elif state in (b"queued", b"running") and not suspect:
                waiting.add(job_id)
        free = {
            owner.decode()
            for owner, jobs_held in held.items()
            if jobs_held < MAX_BATCH and owner not in occupied
        }
        self._note(self._waiting_s, waiting, now_s)
        self._note(self._free_s, free, now_s)
        limit_s = now_s - IDLE_LEASES * world.shape.lease_s
        late = [job for job, since_s in self._waiting_s.items() if since_s < limit_s]
        idle = [owner for owner, since_s in self._free_s.items() if since_s < limit_s]
        if late and idle:
            raise Violation(f"{late} wait, and {idle} have free slots")

    @staticmethod
    def _note(since_s: dict[str, float], names: set[str], now_s: float) -> None:
        for name in since_s.keys() - names:
            del since_s[name]
        for name in names:
            since_s.setdefault(name, now_s)

    async def _owners(self) -> list[bytes]:
        """The worker processes that run now and say so."""
        world = self._world
        pids = {str(member.pid).encode() for member in world.members}
        owners = []
        async for key in world.client.scan_iter(world.shards[-1].worker("*"), count=1_000):
            pid = await world.client.hget(key, "pid")
            if pid in pids:
                owners.append(key.rpartition(b":worker:")[2])
        return owners


async def settle(world: World, jobs: Sequence[Submitted], load: asyncio.Task[None]) -> float:
    """Waits for `load` to end. Returns the seconds it took; raises Violation if it does not."""
    began_s = time.monotonic()
    watch = Watch(world)
    while not load.done():
        world.news.check()
        open_jobs = [job for job in jobs if not job.done]
        if time.monotonic() - began_s > SETTLE_S:
            raise Violation(await _unsettled(world, open_jobs))
        await world.insist(partial(watch.look, [job.plan.id for job in open_jobs]))
        await asyncio.sleep(POLL_S)
    await load
    await _all_up(world)
    return time.monotonic() - began_s


async def _all_up(world: World) -> None:
    """Every member runs and has said so."""
    for _ in range(round(SETTLE_S / POLL_S)):
        world.news.check()
        owners = await Watch(world)._owners()
        if len(owners) == len(world.members):
            return
        await asyncio.sleep(POLL_S)
    raise Violation(f"of {len(world.members)} workers only {owners} serve")


async def _unsettled(world: World, jobs: Sequence[Submitted]) -> str:
    lines = [f"{len(jobs)} jobs have not come to their end"]
    for job in jobs[:8]:
        stored = await world.client.hgetall(world.keys_of(job.plan.id).job(job.plan.id))
        stored.pop(b"spec", None)
        stored.pop(b"result", None)
        waits = [reading for reading in job.readings if not reading.ended]
        last = [reading.events[-1].id if reading.events else "" for reading in waits]
        lines += [f"{job.plan}", f"    {stored}", f"    readers wait behind {last}"]
    return "\n".join(lines)
