"""Publishes: one EMIT per flush for all rows, FINISH behind it, at most one flush in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from mlxq.protocol.scripts import (
    ABORTED,
    BROKEN,
    DONE,
    EXPIRED,
    FENCED,
    GAP,
    LOOK_SEQ,
    REPEATED,
    Call,
    EmitItem,
    Scripts,
    run_all,
)
from mlxq.worker.config import LOOK_INTERVAL_S
from mlxq.worker.link import UNANSWERED, Backoff, Link, decoded
from mlxq.worker.metrics import Metrics
from mlxq.worker.rows import Row, Rows, log_key

_log = structlog.get_logger()

STATUS_NAMES = {
    FENCED: "fenced",
    ABORTED: "aborted",
    EXPIRED: "expired",
    GAP: "gap",
    BROKEN: "broken",
}


class Publisher:
    """Turns rows into script calls, and statuses into ended rows. Loop thread only.

    Invariant: every event is sent under one seq with the same bytes until it is answered, so a
    lost reply can neither lose nor double it.
    """

    def __init__(
        self,
        link: Link,
        scripts: Scripts,
        owner: str,
        rows: Rows,
        metrics: Metrics,
        on_gone: Callable[[Row, str], None],
    ) -> None:
        """`on_gone(row, why)` is told once of every row that this worker no longer holds."""
        self._link = link
        self._scripts = scripts
        self._owner = owner
        self._rows = rows
        self._metrics = metrics
        self._on_gone = on_gone
        self._pending = asyncio.Event()
        self._flushing = asyncio.Lock()

    def notify(self) -> None:
        """Something can be published."""
        self._pending.set()

    async def run(self) -> None:
        """Flushes as soon as there is something, and looks every LOOK_INTERVAL_S otherwise."""
        backoff = Backoff()
        while True:
            await self._wait()
            if await self.flush():
                backoff.reset()
            else:
                self._pending.set()
                await backoff.pause()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_INTERVAL_S):
                await self._pending.wait()
        except TimeoutError:
            pass
        self._pending.clear()

    async def flush(self) -> bool:
        """One round trip for all rows. False: some of it went unanswered and must be repeated."""
        async with self._flushing:
            items, finishing = self._outgoing()
            if not items and not finishing:
                return True
            calls: list[Call[Any]] = [self._scripts.emit(self._owner, [i for _, i in items])]
            calls += [call for _, call in finishing]
            try:
                answers = await self._link.once(lambda: run_all(self._link.client, calls))
            except UNANSWERED:
                return False
            return await self._apply(items, finishing, answers)

    def _outgoing(self) -> tuple[list[tuple[Row, EmitItem]], list[tuple[Row, Call[int]]]]:
        items: list[tuple[Row, EmitItem]] = []
        finishing: list[tuple[Row, Call[int]]] = []
        for row in self._rows:
            items += [(row, item) for item in row.outgoing()]
            call = row.finishing(self._owner, self._scripts)
            if call is not None:
                finishing.append((row, call))
        return items, finishing

    async def _apply(
        self,
        items: list[tuple[Row, EmitItem]],
        finishing: list[tuple[Row, Call[int]]],
        answers: list[Any],
    ) -> bool:
        emitted, *finished = answers
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        for error in failures:
            await self._link.lost(error)
        complete = not failures
        # Ends first: behind a lost reply a repeated EMIT is fenced by its own FINISH.
        for (row, _), status in zip(finishing, finished, strict=True):
            if status in (DONE, REPEATED) and row.ending is not None:
                self._gone(row, row.ending.state)
        if not isinstance(emitted, Exception):
            self._metrics.flushed(sum(item.seq != LOOK_SEQ for _, item in items))
            for (row, item), status in zip(items, emitted, strict=True):
                complete &= await self._settle(row, item, status)
        for (row, _), status in zip(finishing, finished, strict=True):
            if not isinstance(status, Exception):
                complete &= await self._settle(row, None, status)
        return complete

    async def _settle(self, row: Row, item: EmitItem | None, status: int) -> bool:
        """What one status means for its row. False: the same bytes must be sent again."""
        if self._rows.get(row.key) is not row:
            return True
        if status == GAP:
            return await self._mend_gap(row)
        if status not in (DONE, REPEATED):
            self._gone(row, STATUS_NAMES[status])
        elif item is not None:
            row.stored(item)
        return True

    async def _mend_gap(self, row: Row) -> bool:
        """The server's seq is not the one before ours. If we hold what it lacks, the next flush
        sends it. Else a failover lost a tail, or somebody wrote to the hash: the job is given
        back, and whoever resumes it generates the tail anew, or finds the contradiction."""
        key = self._scripts.keys.job(row.key.job_id)
        try:
            said = decoded(await self._link.once(lambda: _hget(self._link, key)) or b"0")
        except UNANSWERED:
            return False
        stored = int(said) if said.isdecimal() and len(said) < 20 else -1
        first_held = row.frozen[0].seq if row.frozen else row.seq + 1
        last_sent = row.frozen[-1].seq if row.frozen else row.seq
        if first_held - 1 <= stored <= last_sent:
            return False
        _log.error("transcript_gap", **log_key(row), stored=stored, held_from=first_held)
        await self._link.call(self._scripts.release(self._owner, "preempt", [row.key]))
        self._gone(row, "gap")
        return True

    def _gone(self, row: Row, why: str) -> None:
        if self._rows.remove(row):
            self._on_gone(row, why)


async def _hget(link: Link, key: str) -> Any:
    return await link.client.hget(key, "seq")
