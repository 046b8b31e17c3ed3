"""Rows that decode together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlxq.worker.engine import caches
from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.logprobs import LazyLogprobs
from mlxq.worker.engine.prefill import Ready
from mlxq.worker.engine.request import Logprob, Output
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions, quantised
from mlxq.worker.engine.sampling import Sampling


class _Ids(NamedTuple):
    """One drawn id of every row, (rows,), and what was reported of them by the rows of then."""

    ids: mx.array
    reports: list[tuple[list[Row], LazyLogprobs]]


class DecodeBatch:
    """Rows that decode together, with one step in flight. Engine thread only.

    `launch` sets the next step going, from ids the host need not know; `read` then waits for the
    step before. So the device has work while the host turns ids into outputs.

    A single row keeps the cache of its prefill; from the second on they are merged. Quantised
    layers are made of those of single rows.

    rows  in the order of the arrays; a row that has ended stays until `leave`
    """

    def __init__(self, network: Any, options: CacheOptions | None = None) -> None:
        self._network = network
        self._kv_bits = options.kv_bits if options else None
        self._clear()

    def _clear(self) -> None:
        self.rows: list[Row] = []
        self._cache: Cache = []
        self._merged = False
        self._sampling: Sampling | None = None
        self._newest: _Ids | None = None
        self._unread: list[_Ids] = []

    @property
    def kv_bytes(self) -> int:
        return caches.kv_bytes(self._cache)

    @property
    def unread(self) -> int:
        """Steps whose ids have been set going and not read."""
        return len(self._unread)

    def join(self, ready: Ready) -> None:
        """Takes in rows whose next ids are drawn; at most one step may be unread."""
        cache, merged = ready.cache, ready.merged
        if self._kv_bits is not None:
            cache = quantised(cache, self._kv_bits)
        joined = _Ids(ready.drawn.ids, [])
        if ready.drawn.logprobs is not None:
            joined.reports.append((ready.rows, ready.drawn.logprobs))
        if self._sampling is None or self._newest is None:
            self._cache, self._merged = cache, merged
            self._sampling, self._newest = ready.sampling, joined
        else:
            if not self._merged:
                self._cache, self._merged = caches.merge([self._cache]), True
            caches.extend(self._cache, cache if merged else caches.merge([cache]))
            self._sampling.extend(ready.sampling)
            self._newest = _Ids(
                mx.concatenate([self._newest.ids, joined.ids]),
                self._newest.reports + joined.reports,
            )
        self.rows = self.rows + ready.rows
        self._unread = [self._newest]

    def launch(self) -> bool:
        """Sets a step going for all rows. False if none is needed: the unread ids end them all."""
        if self._sampling is None or self._newest is None:
            return False
        if self._unread and all(row.left <= 1 for row in self.rows):
            return False
        logits = self._network(self._newest.ids[:, None], cache=self._cache)[:, -1]
        drawn = self._sampling.draw(logits)
        self._newest = _Ids(drawn.ids, [])
        if drawn.logprobs is not None:
            self._newest.reports.append((self.rows, drawn.logprobs))
        reports = drawn.logprobs.arrays if drawn.logprobs else []
        mx.async_eval(drawn.ids, reports)  # type: ignore[no-untyped-call]
        self._unread.append(self._newest)
        return True

    def read(self) -> list[Output]:
        """Waits for the oldest unread step; an output for every row it had, in their order."""
        ids, reports = self._unread.pop(0)
        logprobs: dict[Row, Logprob] = {}
        for rows, lazy in reports:
            logprobs.update((rows[index], value) for index, value in lazy.read().items())
        drawn = cast(list[int], ids.tolist())
        outputs = []
        for row, id in zip(self.rows, drawn, strict=True):
            finish = row.take(id)
            new = [] if finish == "stop" else [id]
            if reports and (logprob := logprobs.get(row)) is not None:
                outputs.append(Output(row.key, new, finish, logprobs=[logprob][: len(new)]))
            else:
                outputs.append(Output(row.key, new, finish))
        return outputs

    def step(self) -> list[Output]:
        """A launch, a read, and the rows that have ended leave."""
        self.launch()
        outputs = self.read() if self._unread else []
        self.leave([index for index, output in enumerate(outputs) if output.finish])
        return outputs

    def leave(self, indices: Sequence[int]) -> None:
        """Drops rows, after a read."""
        if not indices:
            return
        gone = set(indices)
        stay = [index for index in range(len(self.rows)) if index not in gone]
        if not stay:
            self._clear()
            return
        self.rows = [self.rows[index] for index in stay]
        assert self._sampling is not None and self._newest is not None
        caches.keep(self._cache, stay)
        self._sampling.filter(stay)
        kept = _Ids(self._newest.ids[mx.array(stay, mx.int32)], self._newest.reports)
        self._newest, self._unread = kept, [kept] if self._unread else []

    def extract(self, indices: Sequence[int]) -> list[tuple[Cache, int]]:
        """For these rows their own cache, evaluated, and how many of their ids it holds."""
        if not self._merged:
            found = [self._cache for _ in indices]
            mx.eval(caches.arrays(self._cache))
        else:
            found = caches.extract(self._cache, indices)
        behind = 0 if self._unread else 1
        return [
            (cache, self.rows[index].length - behind)
            for cache, index in zip(found, indices, strict=True)
        ]
