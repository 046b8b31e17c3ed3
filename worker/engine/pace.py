"""How many prompt ids the next chunk may read: as many as its time allows."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import NamedTuple

FIRST_IDS = 64
"""Of a chunk whose speed nobody knows yet; a slow CPU reads so many in seconds."""

LEAST_IDS = 32
"""Fewer cost a forward pass hardly less."""

GROWTH = 4
"""A chunk has at most so many times the ids of those that were measured."""

IDLE_S = 1.0
"""What a chunk may take while no row decodes: a new row or an abort waits so long."""

SHARE = 1.6
"""What a chunk may take of the time of a decode step: a step with one takes 2.6 times as long."""

DOUBT = 0.01
"""How much contexts must differ, as a share of their squares, to tell how time grows with them."""


class _Chunk(NamedTuple):
    ids: int
    context: float
    id_s: float


class Pace:
    """Learns from the last chunks and decode steps. Engine thread only.

    The time of an id is taken as a straight line over the ids that its row holds already, since
    attention reads those, fitted to the last chunks by least squares.

    most_ids  no chunk has more
    """

    def __init__(self, most_ids: int) -> None:
        self._most_ids = most_ids
        self._chunks: deque[_Chunk] = deque(maxlen=8)
        self._steps_s: deque[float] = deque(maxlen=15)

    def chunk_read(self, ids: int, context: int, seconds: float) -> None:
        """A chunk of so many ids, after `context` others of its row, took so long."""
        self._chunks.append(_Chunk(ids, context + ids / 2, seconds / ids))

    def stepped(self, seconds: float) -> None:
        """A decode step took so long, apart from any chunk."""
        self._steps_s.append(seconds)

    def ids(self, context: int, *, decoding: bool) -> int:
        """For the next chunk of a row that holds `context` ids, beside a decode step or not."""
        if not self._chunks:
            return min(FIRST_IDS, self._most_ids)
        if not decoding:
            budget_s = IDLE_S
        elif self._steps_s:
            budget_s = SHARE * median(self._steps_s)
        else:
            return min(LEAST_IDS, self._most_ids)
        fitting = self._fit(context, budget_s)
        grown = GROWTH * max(chunk.ids for chunk in self._chunks)
        return min(max(LEAST_IDS, min(fitting, grown)), self._most_ids)

    def _fit(self, context: int, budget_s: float) -> int:
        """The most ids n whose n * (base + slope * (context + n / 2)) is within the budget."""
        base, slope = self._line()
        first_s = base + slope * context
        if slope <= 0.0:
            return int(budget_s / first_s)
        root = (first_s * first_s + 2.0 * slope * budget_s) ** 0.5
        return int((root - first_s) / slope)

    def _line(self) -> tuple[float, float]:
        """Seconds per id at an empty context, above zero, and how many more for each id of it."""
        mean_context = fmean(chunk.context for chunk in self._chunks)
        mean_s = fmean(chunk.id_s for chunk in self._chunks)
        spread = sum((chunk.context - mean_context) ** 2 for chunk in self._chunks)
        together = sum(
            (chunk.context - mean_context) * (chunk.id_s - mean_s) for chunk in self._chunks
        )
        # Contexts that hardly differ tell little of a slope: its estimate is drawn towards zero.
        doubt = DOUBT * len(self._chunks) * mean_context**2
        slope = min(max(0.0, together / (spread + doubt)), 0.8 * mean_s / mean_context)
        return mean_s - slope * mean_context, slope
