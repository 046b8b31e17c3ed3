"""The continuous batch: who waits, reads its prompt, decodes or is parked."""

from __future__ import annotations

import time
from itertools import count, starmap
from typing import Any

import mlx.core as mx
import structlog

from mlxq.worker.engine import caches
from mlxq.worker.engine.groups import DecodeGroups
from mlxq.worker.engine.memory import ClearRhythm, KvCost, end_streams, model_bytes
from mlxq.worker.engine.models import LoadedModel
from mlxq.worker.engine.pace import Pace
from mlxq.worker.engine.prefill import Chunk, Prefill, Ready
from mlxq.worker.engine.prefix_cache import PrefixCache
from mlxq.worker.engine.prefixes import Prefixes
from mlxq.worker.engine.probe import learn_pace, pass_bytes, probe
from mlxq.worker.engine.request import NO_BOUND, Admit, Output, RowKey
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions
from mlxq.worker.engine.turns import Turns
from mlxq.worker.engine.waiting import Waiting

PADDING_PART = 8
"""Of the memory of rows no more than this part may be lost to the padding of a batch."""

_log = structlog.get_logger()


class MlxBatch:
    """A `Batch`: rows wait for one of `max_batch` slots, prefill, decode. Engine thread only.

    A row is in exactly one of `_waiting`, `_prefilling`, `_decoding`; the last two hold slots. One
    that was parked waits again, with its cache. What waits and what prefills goes by rank: the
    higher priority first, then the earlier arrival.

    A step sets a chunk of one prefill going, then a decode step, and waits for the decode step of
    the call before. Rows that are ready join after that. Decode results do not depend on any
    prefill: a row whose prefill raises is run again alone, and fails if it raises alone while a
    known good row does not.

    max_batch     rows with a slot
    prefill_step  most prompt ids that one step reads
    kv_cost       memory of rows that decode; None: it is not looked at
    prefill_cost  memory of rows that are read, if that is more: they are quantised after it
    budget_bytes  what all rows may hold together; a single row always runs
    prefix_cache  where rows find what others have read, and leave what they have
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_batch: int,
        prefill_step: int,
        options: CacheOptions | None = None,
        kv_cost: KvCost | None = None,
        prefill_cost: KvCost | None = None,
        budget_bytes: int = NO_BOUND,
        cache_limit_bytes: int = NO_BOUND,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.info = loaded.info
        self._network: Any = loaded.network
        self._max_batch = max_batch
        self._options = options or CacheOptions()
        self._kv_cost = kv_cost or KvCost(0, 0)
        self._prefill_cost = prefill_cost or self._kv_cost
        self._budget_bytes = budget_bytes
        self._prefixes = Prefixes(
            prefix_cache or PrefixCache.of(self._network, "", memory_bytes=0),
            quantises=self._options.kv_bits is not None,
        )
        # Quantised layers are made of a single row's, one row at a time.
        self._side_by_side = loaded.network.padding_is_exact and self._options.kv_bits is None
        self._arrivals = count()
        self._waiting = Waiting()
        self._pace = Pace(prefill_step)
        self._prefilling = Turns(
            lambda rows: Prefill(self._network, rows, self._options), self._look_up, self._pace
        )
        self._decoding = DecodeGroups(
            self._network,
            self._options,
            token_bytes=self._kv_cost.bytes_per_token,
            pass_bytes=model_bytes(self._network),
        )
        self._cancelled: list[Row] = []
        self._outbox: list[Output] = []
        self._clear_rhythm = ClearRhythm(cache_limit_bytes)
        self._read_at: float | None = None  # of the last call, if it read a step

    @property
    def busy(self) -> bool:
        decoding = len(self._decoding.rows) > len(self._cancelled)
        return bool(decoding or self._waiting or self._prefilling.rows or self._outbox)

    @property
    def kv_bytes(self) -> int:
        return self._decoding.kv_bytes + self._prefilling.kv_bytes + self._waiting.kv_bytes()

    def admit(self, request: Admit) -> None:
        if len(request.generated) >= request.max_tokens:
            self._outbox.append(Output(request.key, [], "length"))
        elif reason := self._refusal(request):
            self._outbox.append(Output(request.key, [], "error", reason))
        else:
            row = Row(request, next(self._arrivals), alone=not self._side_by_side)
            self._waiting.add(row)

    def cancel(self, key: RowKey) -> None:
        """Drops the row; one that decodes leaves with the next step, together with others."""
        self._waiting.drop(key)
        self._prefilling.drop(key)
        self._outbox = [output for output in self._outbox if output.key != key]
        self._cancelled += [
            row for row in self._decoding.rows if row.key == key and row not in self._cancelled
        ]
        if len(self._cancelled) == len(self._decoding.rows):
            self._sweep()

    def step(self) -> list[Output]:
        self._sweep()
        self._start_waiting()
        started_at = time.perf_counter()
        chunk = self._read_chunk()
        launched = self._decoding.launch()
        if outputs := self._decoding.read():
            self._put_out(outputs, chunk)
        else:
            self._read_at = None
            self._pace.interrupted()
            if chunk is not None and not launched:
                mx.eval(chunk.results)
                self._pace.chunk_alone(chunk.ids, time.perf_counter() - started_at)
        if chunk is not None and chunk.ready is not None:
            self._join(chunk.ready)
        put_out, self._outbox = self._outbox, []
        self._clear_rhythm.stepped(idle=not self.busy)
        return put_out

    def close(self) -> None:
        """Frees rows and model; the thread must then end, and its streams with it."""
        self._prefixes.close()
        self._waiting.clear()
        self._cancelled.clear()
        self._network = None
        del self._prefilling, self._decoding
        end_streams()

    def probe(self) -> None:
        """Whether the engine works, apart from the rows it has; raises if not."""
        probe(self._network, self._options, max_batch=self._max_batch)

    def warm_up(self) -> None:
        """The probe, and rows that nobody sent, for the pace; raises if the engine is broken.

        So the first job neither waits for kernels to be compiled nor is read in small chunks.
        """
        self.probe()
        readable = min(pass_bytes(self._network, self._options), self._budget_bytes // PADDING_PART)
        self._decoding.pass_bytes = max(self._decoding.pass_bytes, readable)
        learn_pace(self._pace, self._network, self._options, self.info.context_length)

    def _refusal(self, request: Admit) -> str:
        """Why a request cannot be run; empty if it can. Once it runs, it must not raise."""
        ids = request.prompt + request.generated
        if not request.prompt:
            return "the prompt is empty"
        if not 0 <= min(ids) <= max(ids) < self.info.vocab_size:
            return f"an id is outside the vocabulary of {self.info.vocab_size}"
        if len(request.prompt) + request.max_tokens > self.info.context_length:
            return f"prompt and output exceed the context of {self.info.context_length}"
        return ""

    # Decoding

    def _put_out(self, outputs: list[tuple[Row, Output]], chunk: Chunk | None = None) -> None:
        """The ids of a step that was waited for; rows that end with them leave."""
        if not outputs:
            return
        now = time.perf_counter()
        if self._read_at is not None:
            ids = chunk.ids if chunk is not None else 0
            self._pace.step(now - self._read_at, ids or None, decoding=len(outputs))
        self._read_at = now
        self._outbox += [output for _, output in outputs]
        self._leave([row for row, output in outputs if output.finish])

    def _sweep(self) -> None:
        """Cancelled rows leave."""
        self._leave(self._cancelled)
        self._cancelled = []

    def _leave(self, rows: list[Row]) -> None:
        """Rows leave for good; the prefix cache gets what is new to it of what they have read."""
        self._prefixes.keep_leaving(rows, self._decoding)
        self._decoding.leave(rows)

    def _join(self, ready: Ready) -> None:
        self._prefixes.keep_ready(ready)
        self._decoding.join(ready)

    # Slots and memory

    def _start_waiting(self) -> None:
        """Gives slots to waiting rows, in their order, and takes them from rows of less priority.

        The first that finds no place holds up those behind it: it would wait for ever otherwise.
        """
        while self._waiting:
            row, running = self._waiting.first, self._running()
            full = len(running) >= self._max_batch
            if not full and self._bytes_with(row) <= self._budget_bytes:
                self._start(row)
                continue
            parked = [] if full else self._waiting.parked
            victim = self._victim(row, running + parked)
            if victim is not None:
                self._set_aside(victim, row)
            elif running:
                return
            else:
                self._start(row)

    def _start(self, row: Row) -> None:
        self._waiting.remove(row)
        if row.held < row.length - 1:
            self._prefilling.add(row)
            return
        self._look_up(row)
        ready = Prefill(self._network, [row], self._options).read(0).ready
        assert ready is not None
        self._join(ready)

    def _victim(self, row: Row, candidates: list[Row]) -> Row | None:
        """The last of those that could make room, if its priority is lower."""
        last = max(candidates, key=lambda other: other.rank, default=None)
        return last if last and last.request.priority > row.request.priority else None

    def _set_aside(self, victim: Row, row: Row) -> None:
        """Parks the victim, if its cache and `row` both find room; else it ends as preempted."""
        if victim in self._waiting:
            self._waiting.remove(victim)
        elif victim in self._decoding.rows:
            # The step in flight belongs to the rows of now, and may bring the victim's last id.
            self._put_out(self._decoding.drain())
            if victim not in self._decoding.rows:
                return
            victim.cache, victim.held = self._decoding.extract([victim])[victim]
            self._decoding.leave([victim])
        else:
            self._prefilling.give_back(victim)
        if victim.cache is not None:
            self._prefixes.keep(victim, victim.cache, victim.held)
            if self._bytes_with(row) + caches.kv_bytes(victim.cache) > self._budget_bytes:
                victim.cache = None
                self._outbox.append(Output(victim.key, [], "preempted"))
                return
        self._waiting.add(victim)

    def _running(self) -> list[Row]:
        """The rows with slots."""
        return self._prefilling.rows + self._decoding.rows

    def _bytes_with(self, row: Row) -> int:
        """What this row and those with slots come to, padding included, and what is parked."""
        parts = self._decoding.padded(each.longest for each in [*self._running(), row])
        read = (each.length for each in [*self._prefilling.rows, row])
        more = (self._prefill_cost.of(ids) - self._kv_cost.of(ids) for ids in read)
        return (
            sum(starmap(self._kv_cost.of_batch, parts))
            + sum(more)
            + self._waiting.kv_bytes(apart_from=row)
        )

    # Prefill

    def _read_chunk(self) -> Chunk | None:
        """Sets the next chunk going."""
        decoding = len(self._decoding.rows)
        turn = None
        if not (decoding and self._pace.resting(decoding=decoding)):
            turn = self._prefilling.next(decoding=decoding)
        if turn is None:
            return None
        prefill, ids = turn
        try:
            chunk = prefill.read(ids)
        except Exception as error:
            self._isolate(prefill.rows, error)
            return None
        if chunk.ready is None:
            self._prefilling.put_back(prefill)
            self._prefixes.keep_read(prefill)
        return chunk

    def _isolate(self, rows: list[Row], error: Exception) -> None:
        """Finds who is at fault for a prefill that raised: a row, or the engine.

        Rows that ran side by side start again one by one. A row that was alone is failed, unless
        the probe raises too: then the engine is broken, and must not fail one job after another.
        """
        if len(rows) > 1:
            for row in rows:
                row.alone, row.cache, row.held = True, None, 0
                self._prefilling.add(row)
            return
        self.probe()
        key = rows[0].key
        _log.error("prefill_failed", job=key.job_id, attempt=key.attempt, exc_info=error)
        self._outbox.append(Output(key, [], "error", f"{type(error).__name__}: {error}"))

    def _look_up(self, row: Row) -> None:
        """Once, when its prefill is about to begin: what others have read of it already."""
        if row.begun:
            return
        row.begun = True
        self._prefixes.take(row)
        self._outbox.append(Output(row.key, [], cached=row.held))
