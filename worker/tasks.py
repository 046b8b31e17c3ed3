"""Small rules of asyncio that several parts share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Runs `call` on the loop from any thread; does nothing once the loop has closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # closed: the process is ending
        pass


async def first_of(*waits: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Returns when the first of these is done or the time is up; the others are cancelled."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def cancel_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels until all have ended: redis-py can turn a cancellation into a connection error,
    which a loop that survives outages then survives too."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
