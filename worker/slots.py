"""The slots of the batch and its KV memory, shared by all shards that a worker serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mlxq.protocol.keys import LANES
from mlxq.worker.clock import now_s
from mlxq.worker.engine.request import NO_BOUND
from mlxq.worker.rows import Row, Rows

ALL_LANES = len(LANES)

# Rows held beyond the slots, so that jobs of a higher lane need not wait for a slot: at most a
# quarter of the slots, and no more than this.
MAX_BEYOND = 8

_RECENT = 1 / 8  # weight of the latest job in the mean of the KV memory that a job needs


class Wanted(NamedTuple):
    """What a TAKE may ask for: so many jobs, from so many lanes, the highest first."""

    jobs: int
    lanes: int = ALL_LANES


class Slots:
    """Counts slots and KV memory over the rows of all shards. Loop thread only.

    Invariant: what a TAKE under way asks for is reserved, so that no two shards ask for the
    same slot, and a worker that is empty for one shard is so for all.

    max_batch       rows with a slot
    budget_bytes    KV memory of all rows; what a row needs is known once it is admitted, of
                    others it is taken for the mean of the last ones, at first `usual_bytes`
    """

    def __init__(
        self, max_batch: int, *, budget_bytes: int = NO_BOUND, usual_bytes: int = 0
    ) -> None:
        self.max_batch = max_batch
        self._max_beyond = min(MAX_BEYOND, max(1, max_batch // 4))
        self._budget_bytes = budget_bytes
        self._mean_bytes = float(usual_bytes)
        self._tables: list[Rows] = []
        self._wakes: list[Callable[[], None]] = []
        self._refused: list[Callable[[], None]] = []
        self._reserved = 0
        self._occupied = 0
        self._cramped_at = NO_BOUND
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
        if not 0 < self._occupied >= self._cramped_at:
            self._cramped_at = NO_BOUND
        if self._occupied < before or self.without_rows:
            for wake in self._wakes:
                wake()

    @property
    def occupied(self) -> int:
        return sum(rows.occupied for rows in self._tables)

    def admitted(self, row: Row, kv_bytes: int) -> None:
        """What the row may come to need is known now."""
        row.kv_bytes = kv_bytes
        self._mean_bytes += _RECENT * (kv_bytes - self._mean_bytes)

    def give_back(self, rows: int) -> None:
        """So many rows are about to be given back for want of memory. No slot counts as free until
        one row more has left: they are for another worker, and would only wait here again."""
        self._cramped_at = self.occupied - rows

    @property
    def free(self) -> int:
        """Slots that no row holds and no TAKE asks for, as far as there is memory for a job in
        each. An idle worker has memory for one: a job that can never fit is not admitted."""
        if self._cramped_at < NO_BOUND:
            return 0
        taken = self.occupied + self._reserved
        slots = self.max_batch - taken
        if slots <= 0 or not self._mean_bytes:
            return slots
        room_bytes = self._spare_bytes - self._reserved * self._mean_bytes
        return min(slots, max(int(room_bytes / self._mean_bytes), 0 if taken else 1))

    @property
    def beyond(self) -> int:
        """Rows without a slot: they wait in the engine or are parked there."""
        return max(0, self.occupied - self.max_batch)

    @property
    def _spare_bytes(self) -> float:
        return self._budget_bytes - sum(
            self._mean_bytes if row.kv_bytes is None else row.kv_bytes for row in self._decoding()
        )

    def _decoding(self) -> Iterator[Row]:
        return (row for rows in self._tables for row in rows if row.decoding)

    @property
    def wanted(self) -> Wanted:
        """As many jobs as slots are free. If none is: one whose lane is above that of a row that
        runs, for the engine parks that row; unless too many rows are beyond the slots already, or
        more memory is promised than there is."""
        if (free := self.free) > 0:
            return Wanted(free)
        crowded = self.beyond >= self._max_beyond or self._spare_bytes < 0
        if crowded or self._reserved or not self.occupied:
            return Wanted(0)
        running = sorted(row.priority for row in self._decoding())[: self.max_batch]
        return Wanted(1 if running[-1] else 0, running[-1])

    @property
    def empty(self) -> bool:
        """Whether the worker holds no row and asks for none: only then is it handed a suspect."""
        return not self._reserved and self.without_rows

    @property
    def without_rows(self) -> bool:
        """Whether no row is left, not even one that waits for its FINISH."""
        return not any(len(rows) for rows in self._tables)

    def wants(self, wake: Callable[[], None]) -> bool:
        """Whether a TAKE may ask for anything. If one under way prevents it, `wake` follows it."""
        if self.wanted.jobs:
            return True
        if self._reserved:
            self._refused.append(wake)
        return False

    @contextmanager
    def reserve(self) -> Iterator[Wanted]:
        """All that is wanted, for as long as the block runs; then those it kept out are woken."""
        wanted = self.wanted
        self._reserved += wanted.jobs
        try:
            yield wanted
        finally:
            self._reserved -= wanted.jobs
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
