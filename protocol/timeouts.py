"""The timeout of what a server is asked: a stall of the event loop is not the server's silence."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

PARTS = 10


class ReplyTimeout:
    """`async with ReplyTimeout(seconds)`: as `asyncio.timeout`, but only a loop that runs waits.

    asyncio.timeout expires even if the answer has long arrived and the loop was too busy to read
    it, for the timer is due in the very turn that reads. Here the time passes in PARTS, each begun
    only when the loop has come to the end of the one before: a stall, however long, costs one.
    `seconds` None: there is no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._part_s = None if seconds is None else seconds / PARTS
        self._left = PARTS
        self._alarm: asyncio.TimerHandle | None = None
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._begin_part()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def expire(self) -> None:
        """Ends what runs inside with TimeoutError, in the next turn: an answer read in this one
        still counts."""
        if not self._timeout.expired():
            self._timeout.reschedule(0)

    def _begin_part(self) -> None:
        if self._part_s is not None:
            self._alarm = asyncio.get_running_loop().call_later(self._part_s, self._end_part)

    def _end_part(self) -> None:
        self._left -= 1
        if self._left:
            self._begin_part()
        else:
            self.expire()
