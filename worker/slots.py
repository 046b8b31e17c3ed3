"""The slots of the batch, shared by all shards that a worker serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxq.worker.clock import now_s
from mlxq.worker.rows import Rows


class Slots:
    """Counts slots over the rows of all shards. Loop thread only.

    Invariant: what a TAKE under way asks for is reserved, so that no two shards ask for the
    same slot, and a worker that is empty for one shard is so for all.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._tables: list[Rows] = []
        self._wakes: list[Callable[[], None]] = []
        self._refused: list[Callable[[], None]] = []
        self._reserved = 0
        self._occupied = 0
        self._wanted_by: object | None = None
        self._wanted_until_s = 0.0

    def add(self, rows: Rows, wake: Callable[[], None]) -> None:
        """Rows of one more shard count from now on; `wake` is called when a slot gets free, and
        when the last row has gone."""
        self._tables.append(rows)
        self._wakes.append(wake)

    def changed(self) -> None:
        """Rows have come, ended or gone."""
        before, self._occupied = self._occupied, self.occupied
        if self._occupied < before or self.without_rows:
            for wake in self._wakes:
                wake()

    @property
    def occupied(self) -> int:
        return sum(rows.occupied for rows in self._tables)

    @property
    def free(self) -> int:
        return self._max_batch - self.occupied - self._reserved

    @property
    def empty(self) -> bool:
        """Whether the worker holds no row and asks for none: only then is it handed a suspect."""
        return not self._reserved and self.without_rows

    @property
    def without_rows(self) -> bool:
        """Whether no row is left, not even one that waits for its FINISH."""
        return not any(len(rows) for rows in self._tables)

    def has_free(self, wake: Callable[[], None]) -> bool:
        """Whether a slot is free. If only a TAKE under way is in between, `wake` follows it."""
        if self.free > 0:
            return True
        if self._reserved:
            self._refused.append(wake)
        return False

    @contextmanager
    def reserve(self) -> Iterator[int]:
        """All free slots, for as long as the block runs; then those it kept out are woken."""
        reserved = self.free
        self._reserved += reserved
        try:
            yield reserved
        finally:
            self._reserved -= reserved
            refused, self._refused = self._refused, []
            for wake in refused:
                wake()

    @property
    def unproven(self) -> bool:
        """Whether a suspect runs that has not stored a token: nothing may join it."""
        return any(row.unproven for rows in self._tables for row in rows)

    def want_room(self, intake: object, seconds: float) -> None:
        """`intake` was told to make room: the worker empties, within `seconds` by finishing."""
        self._wanted_by, self._wanted_until_s = intake, now_s() + seconds

    def room_made(self, intake: object) -> None:
        """`intake` has taken what the room was for, or it was not needed."""
        if self._wanted_by is intake:
            self._wanted_by = None

    def waits_for_room(self, intake: object) -> bool:
        """Whether `intake` must not take now, because the worker is being emptied."""
        if self._wanted_by is None:
            return False
        return self._wanted_by is not intake or not self.empty

    @property
    def room_is_late(self) -> bool:
        """Whether the time to finish is over, and rows are to be released."""
        return self._wanted_by is not None and now_s() >= self._wanted_until_s
