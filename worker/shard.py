"""One shard of a queue: all parts that talk to its server, wired around the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from mlxq.protocol.keys import Keys, shard_names
from mlxq.protocol.scripts import ReleaseReason, Scripts
from mlxq.protocol.servers import publish_command
from mlxq.worker.bridge import Bridge
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import EXIT_ENGINE_DIED, Config
from mlxq.worker.doorbell import Doorbell
from mlxq.worker.engine.request import ModelInfo, RowKey
from mlxq.worker.engine.thread import EngineThread
from mlxq.worker.intake import Intake
from mlxq.worker.lease import LeaseThread
from mlxq.worker.link import Link
from mlxq.worker.metrics import Metrics
from mlxq.worker.presence import Presence
from mlxq.worker.publisher import STATUS_NAMES, Publisher
from mlxq.worker.rows import Row, Rows
from mlxq.worker.slots import Slots
from mlxq.worker.sweeper import Sweeper
from mlxq.worker.tasks import cancel_all, post

_log = structlog.get_logger()


class Shard:
    """Loop thread only; its lease thread posts to the loop."""

    def __init__(
        self,
        config: Config,
        number: int,
        info: ModelInfo,
        engine: EngineThread,
        tokenizer: Tokenizer,
        slots: Slots,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._slots = slots
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        keys = Keys(shard_names(config.queue, config.shards)[number])
        scripts = Scripts(keys, publish_command(config.redis_url))
        self.rows = Rows(on_change=self._rows_changed)
        self._link = Link(
            config.redis_url,
            keys.bell,
            timeout_s=config.answer_timeout_s,
            on_back=self._redis_back,
        )
        self._lease = LeaseThread(
            config,
            scripts,
            stalled_s=lambda: engine.stalled_s,
            on_lost=lambda key, status: post(self._loop, partial(self._lost, key, status)),
            on_stall=self._stalled,
        )
        self._publisher = Publisher(
            self._link, scripts, config.owner, self.rows, metrics, self._gone
        )
        self.bridge = Bridge(
            config,
            number,
            info,
            engine,
            tokenizer,
            self._link,
            scripts,
            self.rows,
            slots,
            self._publisher,
            metrics,
        )
        self._intake = Intake(
            config, self._link, scripts, self._lease, self.rows, slots, self.bridge, metrics
        )
        slots.add(self.rows, self._intake.slot_free)
        self._doorbell = Doorbell(config.redis_url, keys.bell, self._intake.notify)
        self.presence = Presence(config, info, self._link, scripts, slots, metrics)
        self._sweeper = Sweeper(self._link, scripts)
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, guarded: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]
    ) -> None:
        """Starts the lease thread, and every other part as a task inside `guarded`."""
        self._lease.start()
        parts = (
            *(self._intake, self._doorbell, self._sweeper, self._publisher),
            *(self.bridge, self.presence),
        )
        self._tasks = [asyncio.create_task(guarded(part.run())) for part in parts]

    async def stop_taking(self) -> None:
        """No TAKE any more. One under way is let finish: cancelled, its jobs would wait for
        their lease to lapse."""
        self._intake.stop()
        await asyncio.wait(self._tasks[:1], timeout=self._config.lease_s)

    async def release(self, reason: ReleaseReason) -> None:
        """Gives back all rows. Gives up after a lease: by then they are anybody's."""
        if not await self._in_time(self._release(reason)):
            _log.warning("release_unanswered", rows=len(self.rows))

    async def _release(self, reason: ReleaseReason) -> None:
        await self.bridge.release(list(self.rows), reason)
        await self.rows.empty.wait()  # rows that are ending still wait for their FINISH
        await self.presence.leave()

    async def _in_time(self, action: Coroutine[Any, Any, None]) -> bool:
        task = asyncio.create_task(action)
        done, _ = await asyncio.wait({task}, timeout=max(1.0, self._config.lease_s))
        await cancel_all([task])
        return bool(done)

    async def close(self) -> None:
        """Ends all parts and closes the connections."""
        await cancel_all(self._tasks)
        self._lease.stop()
        await self._link.close()

    def _rows_changed(self, rows: Rows) -> None:
        self._lease.held = rows.keys
        self._metrics.running, self._metrics.beyond = self._slots.occupied, self._slots.beyond
        self._slots.changed()

    def _gone(self, row: Row, why: str) -> None:
        self.bridge.gone(row, why)

    def _lost(self, key: RowKey, status: int) -> None:
        row = self.rows.get(key)
        if row is not None and row.finish_call is None:
            self.bridge.drop(row, STATUS_NAMES.get(status, str(status)))

    def _redis_back(self, down_s: float) -> None:
        if down_s > self._config.lease_s / 2:
            self._lease.beat_now()
            self._intake.hold(self._config.lease_s / 2)
        self._intake.notify()

    def _stalled(self, stalled_s: float) -> None:
        """On the lease thread. A hung engine thread cannot be ended, so the process is."""
        _log.error(
            "engine_hung",
            stalled_s=round(stalled_s, 1),
            remedy="the process ends, and its service starts it anew; others go on with its jobs. "
            "If a step can take so long, raise --stall-timeout-s",
        )
        os._exit(EXIT_ENGINE_DIED)
