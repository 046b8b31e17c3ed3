"""What rows take from the prefix cache before they read, and leave there after."""

from __future__ import annotations

from collections.abc import Sequence

from mlxq.worker.engine import caches
from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.groups import DecodeGroups
from mlxq.worker.engine.prefill import Prefill, Ready
from mlxq.worker.engine.prefix_cache import PrefixCache
from mlxq.worker.engine.row import Row


class Prefixes:
    """The prefix cache as rows see it. Engine thread only.

    A cache kept in blocks gets them from where they lie, in a batch too. One that is kept whole
    gets a copy of the row, which is made only if it will be kept.

    quantises  whether rows are quantised when they begin to decode: from then on nothing is kept
    """

    def __init__(self, cache: PrefixCache, *, quantises: bool) -> None:
        self._cache = cache
        self._quantises = quantises

    def take(self, row: Row) -> None:
        """What others have read of it already, and where its own prefill is to stop for others."""
        ids, salt = row.ids, row.request.cache_salt
        if (hit := self._cache.take(ids, salt)) is not None:
            row.cache, row.held = hit.cache, hit.length
        row.stops = self._cache.checkpoints(ids, row.held, salt)

    def keep(self, row: Row, cache: Cache, held: int, place: int | None = None) -> None:
        """Of a row whose cache holds so many of its ids: its own, or its place in a batch's."""
        self._cache.put(row.ids[:held], cache, row.request.cache_salt, place=place)

    def keep_read(self, prefill: Prefill) -> None:
        """Of a single row between two chunks; blocks at once, for all at the end take long."""
        row = prefill.rows[0]
        if self._cache.in_blocks or prefill.held in row.stops:
            self.keep(row, prefill.cache, prefill.held)

    def keep_ready(self, ready: Ready) -> None:
        """Of rows that have read all ids but their last."""
        rows, cache, merged = ready
        if self._cache.in_blocks:
            for place, row in enumerate(rows):
                self.keep(row, cache, row.length - 1, place if merged else None)
        elif any(row.length - 1 in row.stops and self._wants(row, row.length - 1) for row in rows):
            found = caches.extract(cache, range(len(rows))) if merged else [cache]
            for row, own in zip(rows, found, strict=True):
                self.keep(row, own, row.length - 1)

    def keep_leaving(self, rows: Sequence[Row], decoding: DecodeGroups) -> None:
        """Of rows that decode and are about to leave."""
        if self._quantises:
            return
        if self._cache.in_blocks:
            for row in rows:
                self.keep(row, *decoding.lend(row))
            return
        wanted = [row for row in rows if self._wants(row, row.length)]
        for row, (cache, held) in decoding.extract(wanted).items():
            self.keep(row, cache, held)

    def close(self) -> None:
        self._cache.close()

    def _wants(self, row: Row, held: int) -> bool:
        return self._cache.wants(row.ids[:held], row.request.cache_salt)
