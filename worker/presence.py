"""What a worker says of itself: a small hash with a time to live, for `mlxq status`."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

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
    """Writes `worker:OWNER` every PRESENCE_INTERVAL_S. Loop thread only."""

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
        self._seen = (now_s(), metrics.tokens)
        self._fixed: dict[Any, Any] = {
            "name": config.name,
            "owner": config.owner,
            "model": info.name,
            "fingerprint": info.fingerprint,
            "slots": config.max_batch,
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
            await asyncio.sleep(PRESENCE_INTERVAL_S)

    async def leave(self) -> None:
        """Removes the hash; unanswered is no matter, it expires by itself."""
        try:
            await self._link.client.delete(self._key)
        except UNANSWERED:
            pass

    async def _write(self) -> None:
        seconds, microseconds = await self._link.client.time()
        fields = {
            **self._fixed,
            "running": self._slots.occupied,
            "tokens_per_s": f"{self._rate():.1f}",
            "seen_ms": seconds * 1000 + microseconds // 1000,
        }
        pipeline = self._link.client.pipeline(transaction=True)
        pipeline.hset(self._key, mapping=fields)
        pipeline.expire(self._key, TTL_S)
        await pipeline.execute()
        self._metrics.waiting[self._keys.queue] = await self._count_waiting()

    async def _count_waiting(self) -> int:
        """Jobs on the lanes that are in nobody's hands."""
        pipeline = self._link.client.pipeline(transaction=False)
        for lane in LANES:
            pipeline.xlen(self._keys.lane(lane))
            pipeline.xpending(self._keys.lane(lane), GROUP)
        replies = await pipeline.execute(raise_on_error=False)
        # A lane without a group has nothing pending.
        pending: int = sum(reply["pending"] for reply in replies[1::2] if isinstance(reply, dict))
        held_or_waiting: int = sum(replies[::2])
        return max(0, held_or_waiting - pending)

    def _rate(self) -> float:
        """Tokens per second since the last time."""
        (then_s, then_tokens), self._seen = self._seen, (now_s(), self._metrics.tokens)
        elapsed_s = self._seen[0] - then_s
        return (self._seen[1] - then_tokens) / elapsed_s if elapsed_s > 0.1 else 0.0
