"""Rows on their way into the decode batch: their prompts are read chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxq.worker.engine import caches
from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions, make_row_cache
from mlxq.worker.engine.sampling import Drawn, Sampling


class Ready(NamedTuple):
    """Rows that have read all of their ids, and drawn the next.

    merged  whether `cache` is that of a batch; if not, it is the own one of the single row
    """

    rows: list[Row]
    cache: Cache
    merged: bool
    sampling: Sampling
    drawn: Drawn


class Chunk(NamedTuple):
    """What one call has set going; nothing waits for it yet.

    ids      that it reads, padding included
    results  what it computes; not to be held on to, or their buffers cannot be used again
    ready    the rows, if these were their last ids
    """

    ids: int
    results: list[mx.array]
    ready: Ready | None


class Prefill:
    """One row, or a few side by side, that read what they do not hold yet. Engine thread only.

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
        return self.begun or self.rows[0].alone or bool(self.rows[0].stops)

    @property
    def left(self) -> int:
        """Ids that the longest row has still to read."""
        if self._cache is None:
            return max(row.length - row.held for row in self.rows)
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
        """Sets a chunk going that reads at most so many ids of each row, at least one.

        Only its last position needs logits. MLX computes what is asked for: a chunk evaluates the
        cache alone, and the last id of all is read on its own.
        """
        cache = self._begin() if self._cache is None else self._cache
        last = self.left <= ids
        count = self.left - 1 if last else ids
        parts = [rest[: len(rest) - 1] if last else rest[:count] for rest in self._rest]
        if any(parts):
            self._forward(parts, cache)
        self._rest = [rest[len(part) :] for rest, part in zip(self._rest, parts, strict=True)]
        self._held += count + last
        ready = self._draw(cache) if last else None
        results = caches.arrays(cache)
        if ready is not None:
            results.append(ready.drawn.ids)
            results += ready.drawn.logprobs.arrays if ready.drawn.logprobs else []
        mx.async_eval(results)  # type: ignore[no-untyped-call]
        return Chunk((count + last) * len(self.rows), results, ready)

    def give_back(self) -> None:
        """A single row takes what has been read along, to go on from there another time."""
        (row,) = self.rows
        if self._cache is not None:
            mx.eval(caches.arrays(self._cache))
            row.cache, row.held = self._cache, self._held

    def _begin(self) -> Cache:
        self._rest = [row.ids[row.held :] for row in self.rows]
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

    def _draw(self, cache: Cache) -> Ready:
        logits = self._network(mx.array(self._rest, mx.int32), cache=cache)[:, -1]
        sampling = Sampling.of([row.sampling for row in self.rows], self._network.vocab_size)
        drawn = sampling.draw(logits)
        return Ready(self.rows, cache, len(self.rows) > 1, sampling, drawn)
