"""What a worker says of itself: a small hash with a time to live, for `mlxq status`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Any

from mlxq import __version__
from mlxq.protocol.scripts import Scripts
from mlxq.worker.clock import now_s
from mlxq.worker.config import PRESENCE_INTERVAL_S, SWEEP_CHUNK, SWEEP_INTERVAL_S, Config
from mlxq.worker.engine.request import ModelInfo
from mlxq.worker.link import UNANSWERED, Link
from mlxq.worker.metrics import Metrics
from mlxq.worker.rows import Rows

TTL_S = 10


class Presence:
    """Writes `worker:OWNER` every PRESENCE_INTERVAL_S. Loop thread only."""

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        link: Link,
        scripts: Scripts,
        rows: Rows,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._link = link
        self._rows = rows
        self._metrics = metrics
        self._key = scripts.keys.worker(config.owner)
        self._seen = (now_s(), metrics.tokens)
        self._fixed: dict[str, Any] = {
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
            await self._write(self._now())
            await asyncio.sleep(PRESENCE_INTERVAL_S)

    async def leave(self) -> None:
        """Removes the hash; unanswered is no matter, it expires by itself."""
        try:
            await self._link.client.delete(self._key)
        except UNANSWERED:
            pass

    def _now(self) -> dict[str, Any]:
        (then_s, then_tokens), self._seen = self._seen, (now_s(), self._metrics.tokens)
        elapsed_s = self._seen[0] - then_s
        rate = (self._seen[1] - then_tokens) / elapsed_s if elapsed_s > 0.1 else 0.0
        return {"running": self._rows.occupied, "tokens_per_s": f"{rate:.1f}"}

    async def _write(self, changing: Mapping[str, Any]) -> None:
        pipeline = self._link.client.pipeline(transaction=True)
        fields: dict[Any, Any] = {**self._fixed, **changing}
        pipeline.hset(self._key, mapping=fields)
        pipeline.expire(self._key, TTL_S)
        try:
            await pipeline.execute()
        except UNANSWERED as error:
            self._link.lost(error)
        else:
            self._link.answered()


class Sweeper:
    """SWEEP once a second: makes aborts and deadlines effective on jobs that nobody runs."""

    def __init__(self, link: Link, scripts: Scripts) -> None:
        self._link = link
        self._call = scripts.sweep(SWEEP_CHUNK)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self._link.call_once(self._call)
            except UNANSWERED:
                continue
