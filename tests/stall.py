"""A busy event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


def stall(seconds: float) -> None:
    """Called in the loop, this holds it up as the work of an application would."""
    time.sleep(seconds)


async def stalled(request: Awaitable[T], seconds: float) -> T:
    """The answer of a request that is sent at once, and comes while the loop stands still."""
    asking = asyncio.ensure_future(request)
    await asyncio.sleep(0)
    stall(seconds)
    return await asking
