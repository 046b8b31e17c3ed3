"""The lease beat: a thread and a connection of its own, so nothing on the loop can delay it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from mlxq.protocol.scripts import DONE, Scripts, run_blocking
from mlxq.worker.clock import now_s
from mlxq.worker.config import Config
from mlxq.worker.engine.request import RowKey
from mlxq.worker.link import UNANSWERED, describe

_log = structlog.get_logger()


class LeaseThread(threading.Thread):
    """Renews the leases of the held rows every quarter of a lease. Owns its connection.

    Invariant: it beats only while the engine makes progress, so that a hung engine loses its
    jobs. The loop hands it the held keys by assigning `held`; results go back through `on_lost`
    and `on_stall`, which must be safe to call from this thread.
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
        self._wake = threading.Event()
        self._stopping = False
        self._beaten_s = now_s()
        self._client = redis.Redis.from_url(
            config.redis_url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=max(0.25, config.lease_s / 4),
            socket_connect_timeout=max(0.25, config.lease_s / 4),
        )

    @property
    def age_s(self) -> float:
        """Seconds since the last answered beat."""
        return now_s() - self._beaten_s

    def beat_now(self) -> None:
        """Asks for a beat without waiting for its turn."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread; the leases run out unless the jobs end or are released."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        while not self._stopping:
            stalled_s = self._stalled_s()
            if stalled_s > self._config.stall_timeout_s:
                self._on_stall(stalled_s)
                return
            self._beat()
            self._wake.wait(self._config.lease_s / 4)
            self._wake.clear()
        self._client.close()

    def _beat(self) -> None:
        held = tuple(self.held)
        asked_s = now_s()
        try:
            statuses = run_blocking(self._client, self._scripts.beat(self._config.owner, held))
        except UNANSWERED as error:
            _log.debug("beat_unanswered", error=describe(error))
            return
        self._beaten_s = asked_s
        for key, status in zip(held, statuses, strict=True):
            if status != DONE:
                self._on_lost(key, status)
