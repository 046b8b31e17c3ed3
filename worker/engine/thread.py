"""The engine thread: the one thread that loads, steps and frees the batch.

It knows the `Batch` protocol and plain messages; it imports no MLX, so that its behaviour can be
tested without a model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from mlxq.worker.engine.request import Admit, Cancel, ModelInfo, Output, RowKey

KV_LOOK_STEPS = 32


class Batch(Protocol):
    """Rows that decode together. Made, called and closed on the engine thread only.

    A checked request never makes a method raise: a row that cannot be run is reported by `step`
    as `Output(finish="error")`. Whatever does raise has broken the whole batch.
    """

    info: ModelInfo

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV caches of all rows."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any row waits, prefills or decodes, so that `step` has something to do."""
        ...

    def admit(self, request: Admit) -> None:
        """Takes in a row; it waits if all slots are taken."""
        ...

    def cancel(self, key: RowKey) -> None:
        """Drops the row, in whatever stage it is; unknown keys are ignored."""
        ...

    def step(self) -> list[Output]:
        """One decode step for the whole batch and at most one prefill chunk."""
        ...

    def close(self) -> None:
        """Frees the rows and the model."""
        ...


class EngineThread:
    """Owns the engine thread. Every method may be called from any thread.

    Messages go in by one queue, outputs come back by `on_outputs`; no lock is held across. Stop and
    join it before the process ends: MLX aborts a process that exits while a thread is in a step.

    load        makes the batch, on the engine thread: MLX streams belong to the thread that made
                them
    on_outputs  called on the engine thread, once per step that gave outputs
    on_dead     called on the engine thread, at most once, with whatever was raised by the load, a
                step or `on_outputs`; the thread ends after it
    info        set when the batch is loaded and warm; holds the exception if that failed
    steps       decode steps made so far
    kv_bytes    memory of the KV caches, looked at every KV_LOOK_STEPS
    """

    def __init__(
        self,
        load: Callable[[], Batch],
        *,
        on_outputs: Callable[[list[Output]], None],
        on_dead: Callable[[BaseException], None],
    ) -> None:
        self.info: Future[ModelInfo] = Future()
        # A running future cannot be cancelled by a waiter that gives up.
        self.info.set_running_or_notify_cancel()
        self.steps = 0
        self.kv_bytes = 0
        self._load = load
        self._on_outputs = on_outputs
        self._on_dead = on_dead
        self._inbox: queue.SimpleQueue[Admit | Cancel | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._progress_at: float | None = None
        # A daemon, so that a step stuck in native code cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def admit(self, request: Admit) -> None:
        self._inbox.put(request)

    def cancel(self, key: RowKey) -> None:
        self._inbox.put(Cancel(key))

    def stop(self) -> None:
        """Asks the thread to end after the current step; rows still running are dropped."""
        self._stopping.set()
        self._inbox.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread to end. False if it has not: the process must go by `os._exit`."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step or message ended while there is work; 0.0 when idle."""
        since = self._progress_at
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        try:
            batch = self._load()
            try:
                self.info.set_result(batch.info)
                self._serve(batch)
            finally:
                batch.close()
        except BaseException as error:
            if not self.info.done():
                self.info.set_exception(error)
            self._on_dead(error)
        else:
            self._progress_at = None

    def _serve(self, batch: Batch) -> None:
        while self._receive(batch):
            outputs = batch.step()
            self.steps += 1
            self._progress_at = time.monotonic()
            if self.steps % KV_LOOK_STEPS == 0 or not batch.busy:
                self.kv_bytes = batch.kv_bytes
            if outputs:
                self._on_outputs(outputs)

    def _receive(self, batch: Batch) -> bool:
        """Hands over every message, and waits for one only if there is nothing to step.

        False if the thread is to end.
        """
        while not self._stopping.is_set():
            if not batch.busy:
                self._progress_at = None
            try:
                message = self._inbox.get(block=not batch.busy)
            except queue.Empty:
                return True
            self._progress_at = time.monotonic()
            if isinstance(message, Admit):
                batch.admit(message)
            elif isinstance(message, Cancel):
                batch.cancel(message.key)
        return False
