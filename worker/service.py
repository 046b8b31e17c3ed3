"""Wires one worker together, serves until told to stop, drains, and says the exit code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from mlxq.protocol.errors import MlxqError
from mlxq.protocol.keys import shard_of
from mlxq.protocol.scripts import ReleaseReason
from mlxq.worker.admission import kv_bytes
from mlxq.worker.chat import Tokenizer
from mlxq.worker.clock import now_s
from mlxq.worker.config import EXIT_BAD_CONFIG, EXIT_DRAINED, EXIT_ENGINE_DIED, Config
from mlxq.worker.engine.request import ModelInfo, Output
from mlxq.worker.engine.thread import Batch, EngineThread
from mlxq.worker.greeting import CannotServe, first_answer
from mlxq.worker.metrics import Metrics
from mlxq.worker.orders import Order, Orders
from mlxq.worker.shard import Shard
from mlxq.worker.slots import Slots
from mlxq.worker.tasks import cancel_all, first_of, post

GREETING_S = 1.0

_log = structlog.get_logger()


async def serve(
    config: Config,
    load: Callable[[], Batch],
    orders: Orders,
    load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
) -> int:
    """Runs one worker until it is drained or its engine dies. Returns the exit code.

    load            makes the batch; it is called on the engine thread
    load_tokenizer  makes the tokenizer of a model's folder; it is called on the loop thread
    """
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[list[Output]] = asyncio.Queue()
    engine = EngineThread(
        load,
        on_outputs=lambda outputs: post(loop, partial(steps.put_nowait, outputs)),
        on_dead=lambda error: post(loop, partial(orders.give, Order.DIE, error)),
    )
    metrics = Metrics(0, kv_bytes=lambda: engine.kv_bytes)
    greeting = asyncio.create_task(first_answer(config))
    try:
        await _check(config, metrics, greeting)
        engine.start()
        info = await _loaded(engine, orders)
        if info is not None:
            tokenizer = load_tokenizer(info.path)
            worker = Worker(config, info, engine, tokenizer, metrics, orders)
            await worker.run(steps, greeting)
    except CannotServe as error:
        orders.give(Order.DIE, error)
    finally:
        engine.stop()
        await cancel_all([greeting])
        metrics.close()
    code = _exit_code(orders)
    if not engine.join(5.0):
        os._exit(code)  # MLX aborts a process that exits while a thread is in a step
    return code


async def _check(config: Config, metrics: Metrics, greeting: asyncio.Task[None]) -> None:
    """What can be known before a model is loaded, which may take minutes.

    Raises CannotServe. A server that does not answer is no reason not to load.
    """
    if config.metrics_port is not None:
        host, port = config.metrics_host, config.metrics_port
        try:
            _log.info("metrics", host=host, port=metrics.serve(host, port))
        except OSError as error:
            reason = f"--metrics-port: cannot listen on {host}:{port}: {error.strerror or error}"
            raise CannotServe(reason) from None
    await asyncio.wait({greeting}, timeout=GREETING_S)
    if greeting.done():
        greeting.result()


async def _loaded(engine: EngineThread, orders: Orders) -> ModelInfo | None:
    """The model, once it is loaded and warm; None if told to stop before that."""
    loading = asyncio.wrap_future(engine.info)
    await first_of(asyncio.shield(loading), orders.above(Order.SERVE))
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
    """The shards of a queue around one engine. Loop thread only."""

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        engine: EngineThread,
        tokenizer: Tokenizer,
        metrics: Metrics,
        orders: Orders,
    ) -> None:
        self._config = config
        self._orders = orders
        self._metrics = metrics
        self._slots = slots = Slots(
            min(config.max_batch, info.max_batch),
            budget_bytes=info.kv_budget_bytes,
            usual_bytes=kv_bytes(info, config.default_max_tokens),
        )
        metrics.slots = slots.max_batch
        self._shards = [
            Shard(config, number, info, engine, tokenizer, slots, metrics)
            for number in range(config.shards)
        ]

    async def run(self, steps: asyncio.Queue[list[Output]], greeting: asyncio.Task[None]) -> None:
        """Serves until an order comes, then gives up all rows as that order says.

        `steps` holds the outputs of the engine, one list per step; `greeting` ends with the first
        answer of the server.
        """
        tasks = [
            asyncio.create_task(self._guarded(self._apply(steps))),
            asyncio.create_task(self._guarded(self._announce(greeting))),
        ]
        for shard in self._shards:
            shard.start(self._guarded)
        try:
            await self._orders.above(Order.SERVE)
            await self._give_up()
        finally:
            for shard in self._shards:
                await shard.close()
            await cancel_all(tasks)

    async def _announce(self, greeting: asyncio.Task[None]) -> None:
        await greeting
        _log.info("serving", queue=self._config.queue, slots=self._slots.max_batch)

    async def _apply(self, steps: asyncio.Queue[list[Output]]) -> None:
        """Gives each shard the outputs of its rows, step by step."""
        shards = self._shards
        stepped_s: float | None = None
        while True:
            outputs = await steps.get()
            if stepped_s is not None:
                self._metrics.stepped(now_s() - stepped_s)
            stepped_s = now_s() if self._slots.occupied else None
            if len(shards) == 1:
                shards[0].bridge.apply(outputs)
                continue
            parts: list[list[Output]] = [[] for _ in shards]
            for output in outputs:
                parts[shard_of(output.key.job_id, len(shards))].append(output)
            for shard, part in zip(shards, parts, strict=True):
                shard.bridge.apply(part)

    async def _guarded(self, part: Coroutine[Any, Any, None]) -> None:
        """A part that ends by an error ends the worker: nothing serves on half alive."""
        try:
            await part
        except Exception as error:
            self._orders.give(Order.DIE, error)

    async def _give_up(self) -> None:
        """Drain, then release what is left. Leases end it if the server never answers."""
        for shard in self._shards:
            shard.presence.say("draining")
        await asyncio.gather(*(shard.stop_taking() for shard in self._shards))
        _log.info("draining", timeout_s=self._config.drain_timeout_s)
        await first_of(
            self._emptied(),
            self._orders.above(Order.DRAIN),
            timeout_s=self._config.drain_timeout_s,
        )
        reason: ReleaseReason = "crash" if self._orders.order is Order.DIE else "drain"
        await asyncio.gather(*(shard.release(reason) for shard in self._shards))

    async def _emptied(self) -> None:
        for shard in self._shards:
            await shard.rows.empty.wait()
