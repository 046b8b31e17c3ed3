"""Takes jobs: as many as there are free slots, and begins each as a row.

Only a job of a higher lane than a row that runs is taken beyond the slots: see `Slots.wanted`.
"""

from __future__ import annotations

import asyncio
import math
import random

import structlog

from mlxq.protocol.scripts import DONE, Scripts, Take, Taken, look
from mlxq.protocol.timeouts import ReplyTimeout
from mlxq.worker.bridge import Bridge
from mlxq.worker.clock import now_s
from mlxq.worker.config import Config
from mlxq.worker.lease import LeaseThread
from mlxq.worker.link import UNANSWERED, Link, decoded
from mlxq.worker.metrics import Metrics
from mlxq.worker.rows import Rows
from mlxq.worker.slots import ALL_LANES, Slots, Wanted

OBSERVE_INTERVAL_S = 0.1  # between two jobs whose time in the queue is looked at
# From a TAKE of higher lanes alone that found nothing to the next: while a worker is full, the bell
# rings for every job.
LOOK_ABOVE_INTERVAL_S = 0.05

_log = structlog.get_logger()


class Intake:
    """The TAKE loop of one queue. Loop thread only.

    Invariant: no more rows than `Slots` allows; a job taken but not yet confirmed by a receipt is
    neither looked at nor counted. `hungry`: the bell may have rung for jobs that no TAKE has asked
    for since, so a slot that gets free is reason enough for one.
    """

    def __init__(
        self,
        config: Config,
        link: Link,
        scripts: Scripts,
        lease: LeaseThread,
        rows: Rows,
        slots: Slots,
        bridge: Bridge,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._link = link
        self._scripts = scripts
        self._lease = lease
        self._rows = rows
        self._slots = slots
        self._bridge = bridge
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._recover = False
        self._hungry = True
        self._stopping = False
        self._hold_until_s = 0.0
        self._look_above_s = 0.0
        self._again_s = math.inf
        self._observe_from_s = 0.0

    def notify(self) -> None:
        """The bell rang, or may have."""
        self._wake.set()

    def slot_free(self) -> None:
        """A slot has become free. An empty worker asks always: only to it a suspect is given."""
        if self._hungry or self._slots.without_rows:
            self._wake.set()

    def hold(self, seconds: float) -> None:
        """No TAKE for so long: owners who lived through an outage keep their jobs."""
        self._hold_until_s = now_s() + seconds

    def stop(self) -> None:
        """No TAKE after the one under way."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Takes until stopped."""
        while not self._stopping:
            more, self._again_s = False, math.inf
            if await self._may_take():
                more = await self._take()
            else:
                self._hungry = True
            if not more and not self._stopping:
                await self._wait()

    async def _wait(self) -> None:
        """Until the bell, a free slot, or a turn for lapsed leases: lease/4 × (0.5 … 1)."""
        turn_s = self._config.lease_s / 4 * random.uniform(0.5, 1.0)
        try:
            async with asyncio.timeout(min(turn_s, self._again_s)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _may_take(self) -> bool:
        # While the server is away the sweep finds out when it is back, not a TAKE: see `hold`.
        if self._link.down or now_s() < self._hold_until_s:
            return False
        if self._slots.waits_for_room(self):
            if self._slots.room_is_late:
                await self._bridge.release(list(self._rows), "preempt")
            return False
        if self._slots.unproven or not self._slots.wants(self.notify):
            return False
        if self._slots.wanted.lanes < ALL_LANES and now_s() < self._look_above_s:
            self._again_s = self._look_above_s - now_s()
            return False
        # An empty worker too: what cannot keep a lease must not take, or it blames the job.
        if self._lease.age_s > self._config.lease_s / 2:
            self._lease.beat_now()
            return False
        return True

    async def _take(self) -> bool:
        """One TAKE with receipt and admission. Whether to ask again at once."""
        alone = self._slots.empty
        with self._slots.reserve() as wanted:
            take = await self._ask(wanted, alone)
            above = wanted.lanes < ALL_LANES
            self._hungry = take is None or above
            if take is None:
                return False
            if above and not take.jobs:
                self._look_above_s = now_s() + LOOK_ABOVE_INTERVAL_S
            for taken in await self._receipt(take.jobs):
                await self._bridge.begin(taken)
        return take.more or len(take.jobs) == wanted.jobs

    async def _ask(self, wanted: Wanted, alone: bool) -> Take | None:
        """The reply of TAKE. None: it was lost, and the next TAKE recovers what it gave out."""
        call = self._scripts.take(
            self._config.owner,
            wanted.jobs,
            lease_ms=self._config.lease_ms,
            alone=alone,
            recover=self._recover,
            lanes=wanted.lanes,
        )
        try:
            take = await self._link.call_once(call)
        except UNANSWERED:
            self._recover = True
            return None
        self._recover = False
        if take.make_room:
            self._slots.want_room(self, self._config.lease_s)
        else:
            self._slots.room_made(self)
        return take

    async def _receipt(self, jobs: list[Taken]) -> list[Taken]:
        """Confirms what was taken before anything touches it; what is not ours is forgotten."""
        if not jobs:
            return []
        looks = [look(taken.id, taken.attempt) for taken in jobs]
        statuses, _ = await asyncio.gather(
            self._link.call(self._scripts.emit(self._config.owner, looks)),
            self._time_in_queue(jobs[0]),
        )
        return [taken for taken, status in zip(jobs, statuses, strict=True) if status == DONE]

    async def _time_in_queue(self, taken: Taken) -> None:
        """Observes now and then how long a job has waited; nothing depends on the answer."""
        if taken.seq or now_s() < self._observe_from_s:
            return
        self._observe_from_s = now_s() + OBSERVE_INTERVAL_S
        key = self._scripts.keys.job(taken.id)
        try:
            async with ReplyTimeout(self._config.answer_timeout_s):
                times = await self._link.client.hmget(key, ["created", "taken"])
            created_ms, taken_ms = (int(decoded(time)) for time in times)
        except (*UNANSWERED, ValueError):
            return
        self._metrics.queued((taken_ms - created_ms) / 1000)
