"""What a worker says of itself: a small hash with a time to live, for `mlxq status`."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Literal

from mlxq import __version__
from mlxq.protocol.keys import GROUP, LANES
from mlxq.protocol.scripts import Scripts
from mlxq.worker.clock import now_s
from mlxq.worker.config import PRESENCE_INTERVAL_S, Config
from mlxq.worker.engine.request import ModelInfo
from mlxq.worker.link import UNANSWERED, Link
from mlxq.worker.metrics import Metrics
from mlxq.worker.slots import Slots

TTL_S = 10


class Presence:
    """Writes `worker:OWNER`, and the owner into `workers`, every PRESENCE_INTERVAL_S.

    `workers` is a sorted set; the score is when the owner was last seen, in ms of the server's
    clock. Who reads it needs no scan of the database. Loop thread only.
    """

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        link: Link,
        scripts: Scripts,
        slots: Slots,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._link = link
        self._slots = slots
        self._metrics = metrics
        self._keys = scripts.keys
        self._key = scripts.keys.worker(config.owner)
        self._tokens = Rate(PRESENCE_INTERVAL_S)
        self._jobs = Rate(15 * PRESENCE_INTERVAL_S)
        self._state = "serving"
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._left = False
        self._fixed: dict[Any, Any] = {
            "name": config.name,
            "owner": config.owner,
            "model": info.name,
            "fingerprint": info.fingerprint,
            "slots": slots.max_batch,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
        }

    async def run(self) -> None:
        while True:
            try:
                await self._link.once(self._write)
            except UNANSWERED:
                pass
            try:
                async with asyncio.timeout(PRESENCE_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    def say(self, state: Literal["serving", "draining"]) -> None:
        """Told at once. A worker that drains has slots, but not for new jobs."""
        self._state = state
        self._changed.set()

    async def leave(self) -> None:
        """Removes what `_write` wrote; unanswered is no matter, it expires by itself."""
        self._left = True
        pipeline = self._link.client.pipeline(transaction=True)
        pipeline.delete(self._key)
        pipeline.zrem(self._keys.workers, self._config.owner)
        try:
            async with self._writing:
                await pipeline.execute()
        except UNANSWERED:
            pass

    async def _write(self) -> None:
        async with self._writing:
            if not self._left:
                await self._write_hash()
                self._metrics.waiting[self._keys.queue] = await self._count_waiting()

    async def _write_hash(self) -> None:
        seconds, microseconds = await self._link.client.time()
        seen_ms = seconds * 1000 + microseconds // 1000
        fields = {
            **self._fixed,
            "state": self._state,
            "running": self._slots.occupied,
            "tokens_per_s": f"{self._tokens.per_s(self._metrics.tokens):.1f}",
            "jobs_per_s": f"{self._jobs.per_s(self._metrics.jobs):.3f}",
            "seen_ms": seen_ms,
        }
        pipeline = self._link.client.pipeline(transaction=True)
        pipeline.hset(self._key, mapping=fields)
        pipeline.expire(self._key, TTL_S)
        pipeline.zadd(self._keys.workers, {self._config.owner: seen_ms})
        pipeline.zremrangebyscore(self._keys.workers, "-inf", seen_ms - TTL_S * 1000)
        pipeline.expire(self._keys.workers, TTL_S)
        await pipeline.execute()

    async def _count_waiting(self) -> int:
        """Jobs on the lanes that are in nobody's hands."""
        pipeline = self._link.client.pipeline(transaction=False)
        for lane in LANES:
            pipeline.xlen(self._keys.lane(lane))
            pipeline.xpending(self._keys.lane(lane), GROUP)
        replies = await pipeline.execute(raise_on_error=False)
        for reply in replies[::2]:
            if isinstance(reply, Exception):
                raise reply
        # A lane without a group has nothing pending.
        pending: int = sum(reply["pending"] for reply in replies[1::2] if isinstance(reply, dict))
        held_or_waiting: int = sum(replies[::2])
        return max(0, held_or_waiting - pending)


class Rate:
    """How fast a counter grows, smoothed over about `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen_s = now_s()
        self._count = 0
        self._rate = 0.0

    def per_s(self, count: int) -> float:
        """The rate, given what the counter says now."""
        elapsed_s = max(1e-3, now_s() - self._seen_s)
        share = min(1.0, elapsed_s / self._window_s)
        self._rate += share * ((count - self._count) / elapsed_s - self._rate)
        self._seen_s, self._count = now_s(), count
        return self._rate
