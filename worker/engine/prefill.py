"""Rows on their way into the decode batch: their prompts are read chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxq.worker.engine import caches
from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions, make_row_cache


class Ready(NamedTuple):
    """Rows that have read all of their ids but the last: the first decode step reads that.

    merged  whether `cache` is that of a batch; if not, it is the own one of the single row
    """

    rows: list[Row]
    cache: Cache
    merged: bool


class Chunk(NamedTuple):
    """What one call has set going; nothing waits for it yet.

    ids      that it reads, padding included; 0 if there was nothing left to read
    results  what it computes; not to be held on to, or their buffers cannot be used again
    ready    the rows, if these were their last ids
    """

    ids: int
    results: list[mx.array]
    ready: Ready | None


class Prefill:
    """One row, or a few side by side, that read what they do not hold yet. Engine thread only.

    The last id of a row is left to a decode step, which draws its first: a prefill has no use for
    logits, and to read an id alone would cost another pass over the weights.

    Their cache is their own until they are ready, so what raises in here harms no other row.
    A row comes with the cache that it was parked with, or that a prefix left it, and goes on
    from there. Several rows can be read side by side only where padding is exact.
    """

    def __init__(
        self, network: Any, rows: Sequence[Row], options: CacheOptions | None = None
    ) -> None:
        self.rows = list(rows)
        self._network = network
        self._options = options or CacheOptions()
        self._cache: Cache | None = None
        self._rest: list[list[int]] = []
        self._held = 0

    @property
    def begun(self) -> bool:
        """Whether anything has been read; until then the rows keep the caches they came with."""
        return self._cache is not None

    @property
    def rank(self) -> tuple[int, int]:
        return self.rows[0].rank

    @property
    def goes_alone(self) -> bool:
        """Whether it cannot be read beside others."""
        row = self.rows[0]
        return self.begun or row.alone or bool(row.stops) or row.length == 1

    @property
    def left(self) -> int:
        """Ids that the longest row has still to read here."""
        if self._cache is None:
            return max(row.length - row.held for row in self.rows) - 1
        return max(map(len, self._rest))

    @property
    def held(self) -> int:
        """Ids that the first row has read."""
        return self.rows[0].held if self._cache is None else self._held

    @property
    def cache(self) -> Cache:
        """What has been read; empty until something has."""
        return self._cache or []

    def read(self, ids: int) -> Chunk:
        """Sets a chunk going that reads at most so many ids of each row.

        MLX computes what is asked for: of a chunk that is the cache, and no logits.
        """
        cache = self._begin() if self._cache is None else self._cache
        count = min(ids, self.left)
        parts = [rest[:count] for rest in self._rest]
        if count:
            self._forward(parts, cache)
        self._rest = [rest[count:] for rest in self._rest]
        self._held += count
        results = caches.arrays(cache)
        mx.async_eval(results)  # type: ignore[no-untyped-call]
        ready = None if self.left else Ready(self.rows, cache, len(self.rows) > 1)
        return Chunk(count * len(self.rows), results, ready)

    def give_back(self) -> None:
        """A single row takes what has been read along, to go on from there another time."""
        (row,) = self.rows
        if self._cache is not None:
            mx.eval(caches.arrays(self._cache))
            row.cache, row.held = self._cache, self._held

    def _begin(self) -> Cache:
        self._rest = [row.ids[row.held : -1] for row in self.rows]
        self._held = self.rows[0].held
        own = [row.cache or make_row_cache(self._network, self._options) for row in self.rows]
        for row in self.rows:
            row.cache, row.held = None, 0
        self._cache = caches.merge(own) if len(own) > 1 else own[0]
        return self._cache

    def _forward(self, parts: list[list[int]], cache: Cache) -> None:
        """Reads the next ids of every row, padded on the right to the longest."""
        lengths = [len(part) for part in parts]
        longest = max(lengths)
        if min(lengths) == longest:
            self._network(mx.array(parts, mx.int32), cache=cache)
            return
        # A rotating cache takes a single position for a decode step, which cannot be padded.
        longest = max(longest, 2)
        padding = [longest - length for length in lengths]
        padded = [part + [0] * count for part, count in zip(parts, padding, strict=True)]
        for entry in cache:
            entry.prepare(lengths=lengths, right_padding=padding)
        self._network(mx.array(padded, mx.int32), cache=cache)
        for entry in cache:
            entry.finalize()
