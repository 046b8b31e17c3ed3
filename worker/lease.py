"""The lease beat: a thread and a connection of its own, so nothing on the loop can delay it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import structlog
from redis.asyncio import Redis as AsyncRedis

from mlxq.protocol.scripts import DONE, Scripts, run
from mlxq.protocol.timeouts import ReplyTimeout
from mlxq.worker.clock import now_s
from mlxq.worker.config import Config
from mlxq.worker.engine.request import RowKey
from mlxq.worker.link import UNANSWERED, connect
from mlxq.worker.trouble import describe

_log = structlog.get_logger()


class LeaseThread(threading.Thread):
    """Renews the leases of the held rows every quarter of a lease, and sooner after a beat that
    went unanswered. Owns its loop and connection.

    Invariant: it beats only while the engine makes progress, so that a hung engine loses its
    jobs. The main loop hands it the held keys by assigning `held`; results go back through
    `on_lost` and `on_stall`, which must be safe to call from this thread.
    """

    def __init__(
        self,
        config: Config,
        scripts: Scripts,
        *,
        stalled_s: Callable[[], float],
        on_lost: Callable[[RowKey, int], None],
        on_stall: Callable[[float], None],
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self.held: Sequence[RowKey] = ()
        self._config = config
        self._scripts = scripts
        self._stalled_s = stalled_s
        self._on_lost = on_lost
        self._on_stall = on_stall
        self._beaten_s = now_s()
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()

    @property
    def age_s(self) -> float:
        """Seconds since the last answered beat."""
        return now_s() - self._beaten_s

    def beat_now(self) -> None:
        """Asks for a beat without waiting for its turn."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        """Ends the thread; the leases run out unless the jobs end or are released."""
        self._stopping = True
        self.beat_now()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._beat_in_turn())

    async def _beat_in_turn(self) -> None:
        config = self._config
        client = connect(config.redis_url, self._scripts.keys.bell)
        try:
            while not self._stopping:
                stalled_s = self._stalled_s()
                if stalled_s > config.stall_timeout_s:
                    self._on_stall(stalled_s)
                    return
                answered = await self._beat(client)
                await self._wait(config.lease_s / (4 if answered else 16))
        finally:
            await client.aclose()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _beat(self, client: AsyncRedis) -> bool:
        """Whether it was answered."""
        held = tuple(self.held)
        asked_s = now_s()
        try:
            # Half a lease: one that is lost leaves time for another, and a slow line is no loss.
            async with ReplyTimeout(self._config.lease_s / 2):
                statuses = await run(client, self._scripts.beat(self._config.owner, held))
        except UNANSWERED as error:
            _log.debug("beat_unanswered", error=describe(error))
            await client.connection_pool.disconnect()
            return False
        self._beaten_s = asked_s
        for key, status in zip(held, statuses, strict=True):
            if status != DONE:
                self._on_lost(key, status)
        return True
