"""Takes jobs: as many as there are free slots, never more, and begins each as a row."""

from __future__ import annotations

import asyncio
import random

import structlog

from mlxq.protocol.scripts import DONE, Scripts, Take, Taken, look
from mlxq.worker.bridge import Bridge
from mlxq.worker.clock import now_s
from mlxq.worker.config import Config
from mlxq.worker.lease import LeaseThread
from mlxq.worker.link import UNANSWERED, Link
from mlxq.worker.rows import Rows

_log = structlog.get_logger()


class Intake:
    """The TAKE loop of one queue. Loop thread only.

    Invariant: never more rows than slots; a job taken but not yet confirmed by a receipt is
    neither looked at nor counted.
    """

    def __init__(
        self,
        config: Config,
        link: Link,
        scripts: Scripts,
        lease: LeaseThread,
        rows: Rows,
        bridge: Bridge,
    ) -> None:
        self._config = config
        self._link = link
        self._scripts = scripts
        self._lease = lease
        self._rows = rows
        self._bridge = bridge
        self._wake = asyncio.Event()
        self._recover = False
        self._stopping = False
        self._hold_until_s = 0.0
        self._room_until_s: float | None = None

    def notify(self) -> None:
        """A slot has become free, or the bell rang."""
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
            more = await self._take() if await self._may_take() else False
            if not more and not self._stopping:
                await self._wait()

    async def _wait(self) -> None:
        """Until the bell, a free slot, or a turn for lapsed leases: lease/4 × (0.5 … 1)."""
        try:
            async with asyncio.timeout(self._config.lease_s / 4 * random.uniform(0.5, 1.0)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _may_take(self) -> bool:
        # While the server is away the sweep finds out when it is back, not a TAKE: see `hold`.
        if self._link.down or now_s() < self._hold_until_s:
            return False
        if self._room_until_s is not None and len(self._rows):
            await self._make_room()
            return False
        if self._free() < 1 or any(row.unproven for row in self._rows):
            return False
        if len(self._rows) and self._lease.age_s > self._config.lease_s / 2:
            self._lease.beat_now()
            return False
        return True

    def _free(self) -> int:
        return self._config.max_batch - self._rows.occupied

    async def _make_room(self) -> None:
        """A suspect waits for an empty worker: rows finish within a lease or are released."""
        if self._room_until_s is not None and now_s() >= self._room_until_s:
            await self._bridge.release(list(self._rows), "preempt")

    async def _take(self) -> bool:
        """One TAKE with receipt and admission. Whether to ask again at once."""
        alone = len(self._rows) == 0
        call = self._scripts.take(
            self._config.owner,
            self._free(),
            lease_ms=self._config.lease_ms,
            alone=alone,
            recover=self._recover,
        )
        try:
            take: Take = await self._link.call_once(call)
        except UNANSWERED:
            self._recover = True
            return False
        self._recover = False
        self._room_until_s = now_s() + self._config.lease_s if take.make_room else None
        for taken in await self._receipt(take.jobs):
            await self._bridge.begin(taken)
        return take.more

    async def _receipt(self, jobs: list[Taken]) -> list[Taken]:
        """Confirms what was taken before anything touches it; what is not ours is forgotten."""
        if not jobs:
            return []
        looks = [look(taken.id, taken.attempt) for taken in jobs]
        statuses = await self._link.call(self._scripts.emit(self._config.owner, looks))
        return [taken for taken, status in zip(jobs, statuses, strict=True) if status == DONE]
