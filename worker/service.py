"""Wires one worker together, serves until told to stop, drains, and says the exit code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from mlxq.protocol.errors import MlxqError
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import ReleaseReason, Scripts
from mlxq.protocol.servers import publish_command
from mlxq.worker.bridge import Bridge
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import EXIT_BAD_CONFIG, EXIT_DRAINED, EXIT_ENGINE_DIED, Config
from mlxq.worker.doorbell import Doorbell
from mlxq.worker.engine.request import ModelInfo, Output, RowKey
from mlxq.worker.engine.thread import Batch, EngineThread
from mlxq.worker.intake import Intake
from mlxq.worker.lease import LeaseThread
from mlxq.worker.link import Link
from mlxq.worker.metrics import Metrics
from mlxq.worker.orders import Order, Orders
from mlxq.worker.presence import Presence
from mlxq.worker.publisher import STATUS_NAMES, Publisher
from mlxq.worker.rows import Row, Rows
from mlxq.worker.sweeper import Sweeper

_log = structlog.get_logger()


async def serve(config: Config, load: Callable[[], Batch], orders: Orders) -> int:
    """Runs one worker until it is drained or its engine dies. Returns the exit code.

    `load` makes the batch; it is called on the engine thread.
    """
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[list[Output]] = asyncio.Queue()
    engine = EngineThread(
        load,
        on_outputs=lambda outputs: _post(loop, partial(steps.put_nowait, outputs)),
        on_dead=lambda error: _post(loop, partial(orders.give, Order.DIE, error)),
    )
    engine.start()
    try:
        info = await _loaded(engine, orders)
        if info is not None:
            worker = Worker(config, info, engine, Tokenizer.load(info.path), orders)
            await worker.run(steps)
    finally:
        engine.stop()
    code = _exit_code(orders)
    if not engine.join(5.0):
        os._exit(code)  # MLX aborts a process that exits while a thread is in a step
    return code


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop has closed: the process is ending
        pass


async def _loaded(engine: EngineThread, orders: Orders) -> ModelInfo | None:
    """The model, once it is loaded and warm; None if told to stop before that."""
    loading = asyncio.wrap_future(engine.info)
    await _first(asyncio.shield(loading), orders.above(Order.SERVE))
    if loading.done() and not loading.cancelled() and loading.exception() is None:
        info = loading.result()
        _log.info("model_loaded", model=info.name, fingerprint=info.fingerprint)
        return info
    if loading.done() and not loading.cancelled():
        orders.give(Order.DIE, loading.exception())
    loading.cancel()
    return None


def _exit_code(orders: Orders) -> int:
    if orders.order is not Order.DIE:
        _log.info("drained")
        return EXIT_DRAINED
    if isinstance(orders.cause, MlxqError):
        _log.error("cannot_start", error=str(orders.cause))
        return EXIT_BAD_CONFIG
    _log.error("engine_died", exc_info=orders.cause)
    return EXIT_ENGINE_DIED


class Worker:
    """All parts of a serving worker. Loop thread only; the lease thread posts to the loop."""

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        engine: EngineThread,
        tokenizer: Tokenizer,
        orders: Orders,
    ) -> None:
        self._config = config
        self._orders = orders
        self._loop = asyncio.get_running_loop()
        keys = Keys(config.queue)
        scripts = Scripts(keys, publish_command(config.redis_url))
        self.metrics = Metrics(config.max_batch)
        self.rows = Rows(on_change=self._rows_changed)
        self.link = Link(
            config.redis_url,
            keys.bell,
            timeout_s=max(1.0, config.lease_s / 3),
            on_back=self._redis_back,
        )
        self.lease = LeaseThread(
            config,
            scripts,
            stalled_s=lambda: engine.stalled_s,
            on_lost=lambda key, status: _post(self._loop, partial(self._lost, key, status)),
            on_stall=self._stalled,
        )
        self.publisher = Publisher(self.link, scripts, config.owner, self.rows, self._gone)
        self.bridge = Bridge(
            config,
            info,
            engine,
            tokenizer,
            self.link,
            scripts,
            self.rows,
            self.publisher,
            self.metrics,
        )
        self.intake = Intake(config, self.link, scripts, self.lease, self.rows, self.bridge)
        self.doorbell = Doorbell(config.redis_url, scripts.keys.bell, self.intake.notify)
        self.presence = Presence(config, info, self.link, scripts, self.rows, self.metrics)
        self.sweeper = Sweeper(self.link, scripts)

    async def run(self, steps: asyncio.Queue[list[Output]]) -> None:
        """Serves until an order comes, then gives up all rows as that order says.

        `steps` holds the outputs of the engine, one list per step.
        """
        if self._config.metrics_port is not None:
            port = self.metrics.serve(self._config.metrics_port)
            _log.info("metrics", port=port)
        self.lease.start()
        taking, *others = self._start(
            self.intake.run(),
            self.doorbell.run(),
            self.sweeper.run(),
            self.bridge.run(steps),
            self.publisher.run(),
            self.presence.run(),
        )
        _log.info("serving", queue=self._config.queue, slots=self._config.max_batch)
        try:
            await self._orders.above(Order.SERVE)
            self.intake.stop()
            await self._give_up(taking)
        finally:
            await _cancel([taking, *others])
            self.lease.stop()
            await self.link.close()

    def _start(self, *parts: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._guarded(part)) for part in parts]

    async def _guarded(self, part: Coroutine[Any, Any, None]) -> None:
        """A part that ends by an error ends the worker: nothing serves on half alive."""
        try:
            await part
        except Exception as error:
            self._orders.give(Order.DIE, error)

    async def _give_up(self, taking: asyncio.Task[None]) -> None:
        """Drain, then release what is left. Leases end it if the server never answers."""
        # A TAKE under way is let finish: cancelled, its jobs would wait for a lease to lapse.
        await asyncio.wait({taking}, timeout=self._config.lease_s)
        _log.info("draining", rows=len(self.rows), timeout_s=self._config.drain_timeout_s)
        await _first(
            self.rows.empty.wait(),
            self._orders.above(Order.DRAIN),
            timeout_s=self._config.drain_timeout_s,
        )
        reason: ReleaseReason = "crash" if self._orders.order is Order.DIE else "drain"
        releasing = asyncio.create_task(self._release(reason))
        _, late = await asyncio.wait({releasing}, timeout=max(1.0, self._config.lease_s))
        if late:
            await _cancel([releasing])
            _log.warning("release_unanswered", rows=len(self.rows))

    async def _release(self, reason: ReleaseReason) -> None:
        await self.bridge.release(list(self.rows), reason)
        await self.rows.empty.wait()  # rows that are ending still wait for their FINISH
        await self.presence.leave()

    def _rows_changed(self, rows: Rows) -> None:
        self.lease.held = rows.keys
        self.metrics.running(rows.occupied)
        self.intake.notify()

    def _gone(self, row: Row, why: str) -> None:
        self.bridge.gone(row, why)

    def _lost(self, key: RowKey, status: int) -> None:
        row = self.rows.get(key)
        if row is not None and row.finish_call is None:
            self.bridge.drop(row, STATUS_NAMES.get(status, str(status)))

    def _redis_back(self, down_s: float) -> None:
        if down_s > self._config.lease_s / 2:
            self.lease.beat_now()
            self.intake.hold(self._config.lease_s / 2)
        self.intake.notify()

    def _stalled(self, stalled_s: float) -> None:
        """On the lease thread. A hung engine thread cannot be ended, so the process is."""
        _log.error("engine_hung", stalled_s=round(stalled_s, 1))
        os._exit(EXIT_ENGINE_DIED)


async def _first(*waits: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Returns when the first of these is done or the time is up; the others are cancelled."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels until all have ended: redis-py can turn a cancellation into a connection error,
    which a loop that survives outages then survives too."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
