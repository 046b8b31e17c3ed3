"""Waits at the bell: the stream that ENQUEUE and RELEASE ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mlxq.protocol.timeouts import ReplyTimeout
from mlxq.worker.link import UNANSWERED, Backoff, connect

BLOCK_MS = 5_000
ANSWER_S = BLOCK_MS / 1000 + 5


class Doorbell:
    """A blocking XREAD on a connection of its own. Loop thread only.

    Reading the bell takes nothing, so it may be cancelled at any time without stranding a job.
    """

    def __init__(self, url: str, key: str, on_ring: Callable[[], None]) -> None:
        self._client = connect(url, key)
        self._key = key
        self._on_ring = on_ring

    async def run(self) -> None:
        """Calls `on_ring` for every ring since the start, and after every lost connection."""
        backoff = Backoff()
        last: bytes | str = "0-0"
        try:
            while True:
                try:
                    async with ReplyTimeout(ANSWER_S):
                        reply: Any = await self._client.xread({self._key: last}, block=BLOCK_MS)
                except UNANSWERED:
                    await self._client.connection_pool.disconnect()
                    await backoff.pause()
                    self._on_ring()
                    continue
                backoff.reset()
                if reply:
                    last = reply[0][1][-1][0]
                    self._on_ring()
        finally:
            await asyncio.shield(self._client.aclose())
