"""The log-probabilities that a row may ask for, beside its ids."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from mlxq.worker.engine.draw import Some, largest
from mlxq.worker.engine.request import Logprob


class LazyLogprobs:
    """The report of one step, not computed yet. Engine thread only.

    arrays   to be evaluated together with the ids: (rows that ask,), and (rows that ask, most
             alternatives) twice
    """

    def __init__(self, counts: dict[int, int], arrays: tuple[mx.array, mx.array, mx.array]) -> None:
        self._counts = counts
        self.arrays = list(arrays)

    @classmethod
    def of(cls, logits: mx.array, ids: mx.array, counts: dict[int, int]) -> LazyLogprobs:
        """Of logits (rows, vocabulary) and the ids drawn from them, (rows,).

        counts: how many alternatives, for each row that asks; there is one at least.
        """
        rows = Some.of([row in counts for row in range(len(ids))])
        logits = rows.take(logits).astype(mx.float32)
        ids = rows.take(ids)[:, None]
        norm = mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = mx.take_along_axis(logits, ids, axis=-1) - norm
        values, top = largest(logits, max(1, *counts.values()))
        return cls(counts, (drawn[:, 0], top, values - norm))

    def read(self) -> dict[int, Logprob]:
        """By index in the batch that was drawn. An id without probability is no alternative."""
        drawn, top, values = (cast(list[Any], array.tolist()) for array in self.arrays)
        reports = {}
        for (row, count), logprob, *best in zip(
            self._counts.items(), drawn, top, values, strict=True
        ):
            pairs = zip(*(each[:count] for each in best), strict=True)
            reports[row] = Logprob(logprob, [pair for pair in pairs if pair[1] > -mx.inf])
        return reports
