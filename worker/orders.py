"""What the worker is told from outside, or by its own failure."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Order(Enum):
    """What the worker is told, in rising urgency."""

    SERVE = 0
    DRAIN = 1
    RELEASE = 2
    DIE = 3


class Orders:
    """The latest order; only rises. Set from the loop thread."""

    def __init__(self) -> None:
        self.order = Order.SERVE
        self.cause: BaseException | None = None
        self._risen = asyncio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM and SIGINT as orders. After the block they are ignored: the process is
        about to end, and one signal more must not change its exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # The loop's own handlers give way to the default action when it closes.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self.on_signal))
        try:
            yield
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def give(self, order: Order, cause: BaseException | None = None) -> None:
        if order.value > self.order.value:
            self.order, self.cause = order, cause
            self._risen.set()

    def on_signal(self) -> None:
        """First SIGTERM or SIGINT: drain. Second: release at once."""
        self.give(Order.DRAIN if self.order is Order.SERVE else Order.RELEASE)

    async def above(self, order: Order) -> None:
        """Returns once an order above `order` is given."""
        while self.order.value <= order.value:
            self._risen.clear()
            await self._risen.wait()
