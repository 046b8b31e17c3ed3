"""Makes aborts and deadlines effective on jobs that nobody runs."""

from __future__ import annotations

import asyncio

from mlxq.protocol.scripts import Scripts
from mlxq.worker.config import SWEEP_CHUNK, SWEEP_INTERVAL_S
from mlxq.worker.link import UNANSWERED, Link


class Sweeper:
    """SWEEP every SWEEP_INTERVAL_S, busy or not. Loop thread only.

    Being the one call that never stops, it also finds out when a lost server is back.
    """

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
