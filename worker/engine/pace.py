"""How many prompt ids the next chunk may read: as many as its time allows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

FIRST_IDS = 64
"""Of a chunk whose speed nobody knows yet; a slow CPU reads so many in seconds."""

LEAST_IDS = 16
"""Fewer cost a forward pass hardly less."""

IDLE_S = 2.0
"""What a chunk may take while no row decodes: a new row or an abort waits so long."""

SHARE = 1.6
"""What a chunk may take of the time of a decode step: a step with one takes 2.6 times as long as
one had taken before prompts came. Rows that joined since have made steps longer; but a chunk may
always take LEAST_SHARE of what a step takes now."""

FEW, MOST_S = 20, 2.0
"""Of prompts that fit one chunk, it may take longer, up to MOST_S, while fewer than FEW times as
many rows decode as are read: a batch that is hardly filled is slow for all who wait, and rows that
decode are held up once. A longer prompt would hold them up chunk after chunk."""

LEAST_SHARE = 0.5
CALM_STEPS = 5
"""So many steps in a row without a chunk show what a step takes when no prompts come."""

FORGET_STEPS = 300
"""Under an unbroken stream of prompts, what a step takes now is the new measure after so many."""

RUN_CHUNKS = 2
"""Chunks beside decode steps are measured so many at a time."""

REST_STEPS = 32
"""After so many steps with a chunk come two without, to see what a step takes now."""

PROBE = 1.5
"""Growth of a chunk that took less than ENOUGH of its time: how much is for itself, and not for its
ids, shows only by trying."""

ENOUGH = 0.8
MOST_GROWTH, MOST_SHRINK = 4.0, 0.1
"""What a single measurement may do to the size of the next chunk."""

FUTILE = 0.75
"""Of the time of chunks four times as large: those that take more are small for nothing. Their time
is for themselves, such as for a kernel that is made for each new shape."""

HOLD = 16
"""For so many measurements chunks are as large as before, then it is tried again."""

TAIL = 1.25
"""A prompt of up to so many chunks is read in one: a small rest would cost a whole forward pass."""


@dataclass(slots=True)
class _Run:
    """Decode steps in a row that chunks were set going in.

    carried  ids of a chunk before them that was done in part in their time
    """

    carried: float = 0.0
    chunks: list[int] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0


class Pace:
    """Steers the size of chunks by the time the last ones took. Engine thread only.

    One size for chunks that run alone, one for those beside decode steps: each is multiplied by
    what its time may be over what it was. So it settles at the time allowed, whatever a chunk
    costs for itself, for each id, and for each id of context. Beside decode steps the size goes
    with the time allowed, which changes with the rows that decode; but it never falls to where a
    chunk takes as long as a larger one.

    Beside decode steps a chunk is not timed by itself: the device works in the order it was told,
    but how far the host runs ahead of it differs between devices. In a run of steps the times
    add up whatever the order: what the decode steps alone would have taken is taken off.

    most_ids  no chunk has more
    """

    def __init__(self, most_ids: int) -> None:
        self._most_ids = most_ids
        self._idle_ids = self._within(FIRST_IDS)
        self._id_s: float | None = None  # of a chunk beside decode steps
        self._alone_id_s: float | None = None  # of the last chunk alone
        self._steps_s: deque[float] = deque(maxlen=3)
        self._steps_rows = 0  # of the last of these
        self._calm_s: float | None = None
        self._calm_steps = 0
        self._since_calm = 0
        self._busy_steps = 0
        self._before: int | None = None
        self._run = _Run()
        self._last = (0.0, 0.0)  # ids and seconds of the chunks measured last
        self._floor_ids = 0.0
        self._held = 0

    def size(self, *, decoding: int, reading: int = 1) -> int:
        """Ids of the next chunk, while so many rows decode and so many read prompts that fit it."""
        if not decoding:
            return int(self._idle_ids)
        id_s = self._id_s or self._alone_id_s
        if not id_s or not self._steps_s:
            return int(self._within(FIRST_IDS))
        crowd = FEW * reading / decoding
        budget_s = max(self._budget_s, min(MOST_S, self._budget_s * crowd))
        return int(self._within(max(budget_s / id_s, self._floor_ids)))

    def ids(self, left: int, *, decoding: int, reading: int = 1) -> int:
        """The same for a single prompt with so many ids left, whether it fits or not."""
        if left <= self.size(decoding=decoding, reading=reading):
            return left
        size = self.size(decoding=decoding, reading=0)
        return min(left, self._most_ids) if left <= TAIL * size else _round(size)

    def chunk_alone(self, ids: int, seconds: float) -> None:
        """A chunk of so many ids took so long by itself; one of none tells nothing."""
        if not ids:
            return
        self._alone_id_s = seconds / ids
        self._idle_ids = self._steered(self._idle_ids, ids, seconds, IDLE_S)

    def step(self, seconds: float, chunk: int | None, *, decoding: int) -> None:
        """So long after the last, a decode step was read; a chunk of so many ids was set going.

        Work that is set going in a step is done in it or in the next: of a chunk at the edge of a
        run one half counts.
        """
        before, self._before = self._before, chunk
        if chunk is None and before is None:
            if self._outgrown(decoding):
                self._steps_s.clear()
            self._steps_s.append(seconds)
            self._steps_rows = decoding
            self._busy_steps = 0
            self._calm_steps += 1
            if self._calm_steps >= CALM_STEPS or self._since_calm >= FORGET_STEPS:
                self._calm_s = median(self._steps_s)
                self._since_calm = 0
            return
        self._calm_steps = 0
        self._since_calm += 1
        self._busy_steps += 1
        run = self._run
        run.seconds += seconds
        run.steps += 1
        if chunk is not None:
            run.chunks.append(chunk)
            if len(run.chunks) < RUN_CHUNKS:
                return
        over = 0.0 if chunk is None else chunk / 2
        if run.chunks and self._steps_s:
            self._learn(run, over)
        self._run = _Run(carried=over)

    def interrupted(self) -> None:
        """The next step does not follow on the last: what is half measured does not count."""
        self._before, self._run = None, _Run()

    def resting(self, *, decoding: int) -> bool:
        """Whether the next step, beside so many decoding rows, should have no chunk."""
        unknown = not self._steps_s or self._outgrown(decoding)
        return unknown or self._busy_steps >= REST_STEPS

    def _outgrown(self, decoding: int) -> bool:
        """Whether far fewer rows decode than did when steps were measured.

        Chunks would seem to take no time: what such steps take is taken off.
        """
        return 2 * decoding < self._steps_rows

    @property
    def _budget_s(self) -> float:
        now_s = median(self._steps_s)
        calm_s = min(self._calm_s or now_s, now_s)
        return max((1.0 + SHARE) * calm_s - now_s, LEAST_SHARE * now_s)

    def _learn(self, run: _Run, over: float) -> None:
        """over: ids of the run's chunks that are read after it."""
        alone_s = run.steps * median(self._steps_s)
        chunks_s = max(run.seconds - alone_s, 0.05 * run.seconds)
        size = sum(run.chunks) / len(run.chunks)
        each_s = chunks_s * size / (sum(run.chunks) + run.carried - over)
        self._compare(size, chunks_s / len(run.chunks))
        allowed = self.size(decoding=1, reading=0)
        self._id_s = self._budget_s / self._steered(allowed, size, each_s, self._budget_s)

    def _compare(self, size: float, seconds: float) -> None:
        """Whether smaller chunks than the last ones were of use."""
        last, its_s = self._last
        self._last = size, seconds
        self._held += 1
        if size <= last / 4 and seconds > FUTILE * its_s:
            self._floor_ids, self._held = last, 0
        elif self._held >= HOLD or seconds < its_s / 2:
            self._floor_ids = 0.0

    def _steered(self, size: float, read: float, seconds: float, budget_s: float) -> float:
        """The next size, after a chunk of `read` ids took so long.

        In proportion no more fit than really do, since a chunk also costs for itself.
        """
        fitting = read * budget_s / max(seconds, 1e-9)
        if fitting < read:
            return self._within(max(fitting, MOST_SHRINK * read))
        if read >= size / 2 and seconds < ENOUGH * budget_s:
            fitting = max(fitting, PROBE * size)
        return self._within(max(size, min(fitting, MOST_GROWTH * read)))

    def _within(self, ids: float) -> float:
        return min(max(ids, float(min(LEAST_IDS, self._most_ids))), float(self._most_ids))


def _round(size: int) -> int:
    """Down to a power of two or one and a half of it: sizes that come again find buffers of theirs,
    and on CUDA plans of their attention."""
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if 2 * size >= 3 * power > 2 else power
