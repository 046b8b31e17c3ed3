"""Rows without a slot."""

from __future__ import annotations

from bisect import insort

from mlxq.worker.engine import caches
from mlxq.worker.engine.request import RowKey
from mlxq.worker.engine.row import Row


class Waiting:
    """Rows that wait for a slot, and those that are parked: they had one, and kept their cache.

    All in one order: the higher priority first, then the earlier arrival. Engine thread only.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    @property
    def first(self) -> Row:
        return self._rows[0]

    @property
    def parked(self) -> list[Row]:
        return [row for row in self._rows if row.cache is not None]

    def add(self, row: Row) -> None:
        insort(self._rows, row, key=lambda other: other.rank)

    def remove(self, row: Row) -> None:
        self._rows.remove(row)

    def drop(self, key: RowKey) -> None:
        self._rows = [row for row in self._rows if row.key != key]

    def clear(self) -> None:
        self._rows.clear()

    def kv_bytes(self, *, apart_from: Row | None = None) -> int:
        """Memory of what is parked."""
        rows = (row for row in self._rows if row is not apart_from)
        return sum(caches.kv_bytes(row.cache) for row in rows if row.cache is not None)
