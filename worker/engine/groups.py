"""All rows that decode, in batches of like length."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.decode import DecodeBatch
from mlxq.worker.engine.prefill import Ready
from mlxq.worker.engine.request import Output
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions


class DecodeGroups:
    """All rows that decode, in batches of like length. Engine thread only.

    The rows of a batch are padded to the longest: each takes its memory, and attention reads it. A
    long row among many short ones would make all of them slow, and take many times what it needs.
    Another batch costs one more pass. So rows part where to read the padding would take longer.

    token_bytes  keys and values of one position of one row
    pass_bytes   what can be read in the time of a forward pass: the weights, and more where the
                 host or the launch of kernels takes longer than they do
    """

    def __init__(
        self, network: Any, options: CacheOptions, *, token_bytes: int, pass_bytes: int
    ) -> None:
        self._network = network
        self._options = options
        self._token_bytes = token_bytes
        self.pass_bytes = pass_bytes
        self._batches: list[DecodeBatch] = []

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self._batches for row in batch.rows]

    @property
    def kv_bytes(self) -> int:
        return sum(batch.kv_bytes for batch in self._batches)

    def padded(self, lengths: Iterable[int]) -> list[tuple[int, int]]:
        """How rows of these lengths would part: of each batch its number of rows and longest."""
        parts: list[tuple[int, int]] = []
        padding = 0
        for length in sorted(lengths, reverse=True):
            rows, longest = parts[-1] if parts else (0, length)
            padding += longest - length
            if rows and self._may_have(padding):
                parts[-1] = rows + 1, longest
            else:
                parts.append((1, length))
                padding = 0
        return parts

    def join(self, ready: Ready) -> None:
        """Takes in rows that have read all but their last id, between a read and a launch."""
        joined = DecodeBatch(self._network, self._options)
        joined.join(ready)
        self._batches.append(joined)

    def launch(self) -> bool:
        """Sets a step going for all rows; False if there is none to set going."""
        self._unite()
        return any([batch.launch() for batch in self._batches])

    def read(self) -> list[tuple[Row, Output]]:
        """Waits for the step before the one just launched; what each row got from it."""
        return [each for batch in self._batches for each in batch.read()]

    def drain(self) -> list[tuple[Row, Output]]:
        """Waits for the step in flight, so that all rows stand where their outputs do."""
        return [each for batch in self._batches for each in batch.drain()]

    def leave(self, rows: Collection[Row]) -> None:
        """Drops these rows, between a read and the next launch."""
        if not rows:
            return
        for batch in self._batches:
            batch.leave(rows)
        self._batches = [batch for batch in self._batches if batch.rows]

    def extract(self, rows: Sequence[Row]) -> dict[Row, tuple[Cache, int]]:
        """For these rows their own cache, evaluated, and how many of their ids it holds."""
        found: dict[Row, tuple[Cache, int]] = {}
        for batch in self._batches:
            there = [row for row in batch.rows if row in rows]
            if there:
                found.update(zip(there, batch.extract(there), strict=True))
        return found

    def lend(self, row: Row) -> tuple[Cache, int, int | None]:
        """The cache a row is in, how many of its ids that holds, and its place; None: its own."""
        batch = next(batch for batch in self._batches if row in batch.rows)
        return batch.lend(row)

    def _unite(self) -> None:
        """Batches whose rows may share one do, those that add the least padding first."""
        while len(self._batches) > 1:
            able = [_with_lengths(batch) for batch in self._batches if not batch.holds_nothing]
            pairs = [
                (_padding(a + b) - _padding(a) - _padding(b), into, other)
                for (into, a), (other, b) in combinations(able, 2)
                if self._may_have(_padding(a + b))
            ]
            if not pairs:
                return
            _, into, other = min(pairs, key=lambda pair: pair[0])
            into.absorb(other)
            self._batches.remove(other)

    def _may_have(self, padding: int) -> bool:
        return padding * self._token_bytes <= self.pass_bytes


def _with_lengths(batch: DecodeBatch) -> tuple[DecodeBatch, list[int]]:
    return batch, [row.length for row in batch.rows]


def _padding(lengths: list[int]) -> int:
    """Positions of padding in a batch of rows of these lengths."""
    return len(lengths) * max(lengths) - sum(lengths)
