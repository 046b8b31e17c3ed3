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

RUN_CHUNKS = 4
"""Chunks beside decode steps are measured so many at a time."""

REST_STEPS = 32
"""After so many steps with a chunk come two without, to see what a step takes now."""

DOUBT = 0.01
"""How much contexts must differ, as a share of their squares, to tell how time grows with them."""


class _Sample(NamedTuple):
    """Chunks measured together: how large one is, where in its row, and seconds per id.

    weight  ids in all
    """

    chunk_ids: float
    context: float
    id_s: float
    weight: float


class Pace:
    """Learns from the last chunks and decode steps. Engine thread only.

    Beside decode steps a chunk is not timed by itself: the device works in the order it was told,
    but how far the host runs ahead of it differs between devices. In a run of steps the times
    add up whatever the order: what the decode steps alone would have taken is taken off.

    The time of an id is a straight line over the ids that its row holds already, since attention
    reads those, fitted to the last samples by least squares.

    most_ids  no chunk has more
    """

    def __init__(self, most_ids: int) -> None:
        self._most_ids = most_ids
        self._samples: deque[_Sample] = deque(maxlen=8)
        self._steps_s: deque[float] = deque(maxlen=5)
        self._busy_steps = 0
        self._before: tuple[int, int] | None = None
        self._run: list[tuple[int, int]] = []
        self._run_s = 0.0
        self._run_steps = 0
        self._carried = 0.0

    def chunk_alone(self, ids: int, context: int, seconds: float) -> None:
        """A chunk of so many ids, after `context` others of its row, took so long by itself."""
        self._learn([(ids, context)], ids, seconds)

    def step(self, seconds: float, chunk: tuple[int, int] | None) -> None:
        """So long after the last, a decode step was read; a chunk of ids and context was set going.

        Work that is set going in a step is done in it or in the next: of a chunk at the edge of a
        run one half counts.
        """
        before, self._before = self._before, chunk
        if chunk is None and before is None:
            self._steps_s.append(seconds)
            self._busy_steps = 0
            return
        self._busy_steps += 1
        self._run_s += seconds
        self._run_steps += 1
        if chunk is not None:
            self._run.append(chunk)
            if len(self._run) < RUN_CHUNKS:
                return
        over = 0.0 if chunk is None else chunk[0] / 2
        if self._run:
            ids = sum(count for count, _ in self._run) + self._carried - over
            alone_s = self._run_steps * median(self._steps_s) if self._steps_s else 0.0
            self._learn(self._run, ids, max(self._run_s - alone_s, 0.05 * self._run_s))
        self._run, self._run_s, self._run_steps, self._carried = [], 0.0, 0, over

    @property
    def resting(self) -> bool:
        """Whether the next step should have no chunk."""
        return self._busy_steps >= REST_STEPS

    def ids(self, context: int, *, decoding: bool) -> int:
        """For the next chunk of a row that holds `context` ids, beside a decode step or not."""
        if not self._samples:
            return min(FIRST_IDS, self._most_ids)
        if not decoding:
            budget_s = IDLE_S
        elif self._steps_s:
            budget_s = SHARE * median(self._steps_s)
        else:
            return min(LEAST_IDS, self._most_ids)
        grown = int(GROWTH * max(sample.chunk_ids for sample in self._samples))
        return min(max(LEAST_IDS, min(self._fit(context, budget_s), grown)), self._most_ids)

    def _learn(self, chunks: list[tuple[int, int]], ids: float, seconds: float) -> None:
        size = fmean(count for count, _ in chunks)
        context = fmean(held + count / 2 for count, held in chunks)
        self._samples.append(_Sample(size, context, max(seconds, 1e-9) / ids, ids))

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
        weights = [sample.weight for sample in self._samples]
        mean_context = fmean((sample.context for sample in self._samples), weights)
        mean_s = fmean((sample.id_s for sample in self._samples), weights)
        spread = together = 0.0
        for _, context, id_s, weight in self._samples:
            spread += weight * (context - mean_context) ** 2
            together += weight * (context - mean_context) * (id_s - mean_s)
        # Contexts that hardly differ tell little of a slope: its estimate is drawn towards zero.
        doubt = DOUBT * sum(weights) * mean_context**2
        slope = min(max(0.0, together / (spread + doubt)), 0.8 * mean_s / mean_context)
        return mean_s - slope * mean_context, slope
