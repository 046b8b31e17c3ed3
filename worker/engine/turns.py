"""Rows that prefill: whose chunk comes next, and how large it may be."""

from __future__ import annotations

from collections.abc import Callable

from mlxq.worker.engine import caches
from mlxq.worker.engine.pace import Pace
from mlxq.worker.engine.prefill import Prefill
from mlxq.worker.engine.request import RowKey
from mlxq.worker.engine.row import Row


class Turns:
    """The prefills under way, those that have not begun included. Engine thread only.

    Each is of a single row between two steps: rows that are read side by side fit one chunk.
    Among those of the highest priority, the oldest and the one with least left take turns, so that
    neither starves the other.

    new      makes a prefill
    look_up  called once for each row, before the first of it is read
    """

    def __init__(
        self, new: Callable[[list[Row]], Prefill], look_up: Callable[[Row], None], pace: Pace
    ) -> None:
        self._new = new
        self._look_up = look_up
        self._pace = pace
        self._prefills: list[Prefill] = []
        self._oldest_had_turn = False

    @property
    def rows(self) -> list[Row]:
        return [row for prefill in self._prefills for row in prefill.rows]

    @property
    def kv_bytes(self) -> int:
        return sum(caches.kv_bytes(prefill.cache) for prefill in self._prefills)

    def add(self, row: Row) -> None:
        self._prefills.append(self._new([row]))

    def drop(self, key: RowKey) -> None:
        self._prefills = [each for each in self._prefills if each.rows[0].key != key]

    def give_back(self, row: Row) -> None:
        """The row leaves, with what it has read."""
        prefill = next(each for each in self._prefills if each.rows[0] is row)
        self._prefills.remove(prefill)
        prefill.give_back()

    def next(self, *, decoding: int) -> tuple[Prefill, int] | None:
        """The prefill whose turn it is, taken out, and how many ids it may read of each row.

        decoding  how many rows decode meanwhile
        One that is not ready after that comes back by `put_back`.
        """
        if not self._prefills:
            return None
        first = self._whose_turn()
        self._look_up(first.rows[0])
        reading = len(self._prefills)
        size = self._pace.size(decoding=decoding, reading=reading)
        chosen = self._with_others(first, size)
        self._prefills = [each for each in self._prefills if each not in chosen]
        if len(chosen) > 1:
            return self._new([each.rows[0] for each in chosen]), size // len(chosen)
        ids = self._pace.ids(first.left, decoding=decoding, reading=reading)
        stop = next((length for length in first.rows[0].stops if length > first.held), None)
        return first, ids if stop is None else min(ids, stop - first.held)

    def put_back(self, prefill: Prefill) -> None:
        self._prefills.append(prefill)

    def _whose_turn(self) -> Prefill:
        highest = min(each.rank[0] for each in self._prefills)
        those = [each for each in self._prefills if each.rank[0] == highest]
        self._oldest_had_turn = not self._oldest_had_turn
        if self._oldest_had_turn:
            return min(those, key=lambda prefill: prefill.rank)
        return min(those, key=lambda prefill: (prefill.left, prefill.rank))

    def _with_others(self, first: Prefill, ids: int) -> list[Prefill]:
        """The first, and others that fit a chunk of so many ids beside it, padding included."""
        chosen, longest = [first], first.left
        if first.goes_alone or 2 * longest > ids:
            return chosen
        for other in sorted(self._prefills, key=lambda prefill: prefill.rank):
            if longest * (len(chosen) + 1) > ids:
                break
            if other is first or other.goes_alone:
                continue
            self._look_up(other.rows[0])
            longer = max(longest, other.left)
            if not other.goes_alone and longer * (len(chosen) + 1) <= ids:
                chosen.append(other)
                longest = longer
        return chosen
