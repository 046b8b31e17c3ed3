"""What changes a row's logits before anything is drawn: penalties, logit bias, min_tokens.

The counts that penalties need live on the device, and take in ids that the host has not read yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxq.worker.engine.draw import fused
from mlxq.worker.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What the sampling of one row starts from; `generated` are the ids it has put out already.

    Ids of prompt and output lie in the vocabulary; `stop_ids` and those of the bias need not.
    """

    params: SamplingParams
    prompt: list[int]
    generated: list[int]
    stop_ids: frozenset[int]


class Penalties:
    """Penalties, bias and min_tokens of the rows of a batch, in its order. Engine thread only.

    A table exists while a row needs it. It has a row for every row of the batch: where none is
    needed the parameters are neutral and leave the logits as they are, bit by bit.
    """

    def __init__(self, rows: list[_Row], seen: Counts | None, output: Counts | None) -> None:
        self._rows = rows
        self._seen = seen
        self._output = output
        self._set_parameters()

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> Penalties:
        """Reads prompt and output of the rows that need their counts."""
        seen = output = None
        if any(_repeats(row.params) for row in rows):
            seen = Counts.of(
                [row.prompt + row.generated if _repeats(row.params) else [] for row in rows],
                [row.params.repetition_window for row in rows],
                vocab_size,
            )
        if any(_weighs_output(row.params) for row in rows):
            output = Counts.of(
                [row.generated if _weighs_output(row.params) else [] for row in rows],
                [0] * len(rows),
                vocab_size,
            )
        return cls([_Row.of(row, vocab_size) for row in rows], seen, output)

    def extend(self, other: Penalties) -> None:
        sizes = (len(self._rows), len(other._rows))
        self._seen = _joined(self._seen, other._seen, sizes)
        self._output = _joined(self._output, other._output, sizes)
        self._rows = self._rows + other._rows
        self._set_parameters()

    def filter(self, keep: list[int]) -> None:
        self._rows = [self._rows[index] for index in keep]
        params = [row.params for row in self._rows]
        self._seen = self._seen.kept(keep) if self._seen and any(map(_repeats, params)) else None
        self._output = (
            self._output.kept(keep) if self._output and any(map(_weighs_output, params)) else None
        )
        self._set_parameters()

    def apply(self, logits: mx.array) -> mx.array:
        """Logits (rows, vocabulary) as they came, or changed and float32.

        Repetition after CTRL (https://arxiv.org/abs/1909.05858), presence and frequency as in the
        OpenAI API: of the output alone, once per id and once per occurrence.
        """
        if self._seen is not None:
            logits = _weaken_seen(logits, self._seen.table, self._repetition)
        if self._output is not None:
            logits = _weaken_output(logits, self._output.table, self._presence, self._frequency)
        held = [index for index in self._counted if self._rows[index].held]
        if held != self._held:
            self._set_offsets(held)
        if self._offsets is not None:
            rows, ids, values = self._offsets
            logits = logits.astype(mx.float32).at[rows, ids].add(values)
        return logits

    def count(self, ids: mx.array) -> None:
        """Takes in the next id of every row: integers (rows,)."""
        if self._seen is not None:
            self._seen.add(ids)
        if self._output is not None:
            self._output.add(ids)
        for index in self._counted:
            self._rows[index].made += 1

    def _set_parameters(self) -> None:
        params = [row.params for row in self._rows]
        self._repetition = _column([each.repetition_penalty for each in params])
        self._presence = _column([each.presence_penalty for each in params])
        self._frequency = _column([each.frequency_penalty for each in params])
        self._counted = [index for index, row in enumerate(self._rows) if row.held]
        self._set_offsets(self._counted)

    def _set_offsets(self, held: list[int]) -> None:
        """What is added to single logits: the bias, and -inf to the stop ids of `held` rows."""
        self._held = held
        offsets = [
            (index, id, value)
            for index, row in enumerate(self._rows)
            for id, value in row.bias.items()
        ]
        offsets += [(index, id, -mx.inf) for index in held for id in self._rows[index].stop_ids]
        self._offsets: tuple[mx.array, mx.array, mx.array] | None = None
        if offsets:
            rows, ids, values = zip(*offsets, strict=True)
            self._offsets = (mx.array(rows), mx.array(ids), mx.array(values, mx.float32))


@dataclass(slots=True)
class _Row:
    """The row's part that the host knows. `made` is counted only while min_tokens holds it."""

    params: SamplingParams
    bias: dict[int, float]
    stop_ids: list[int]
    made: int

    @property
    def held(self) -> bool:
        """Whether the next id must not be a stop id."""
        return self.made < self.params.min_tokens and bool(self.stop_ids)

    @classmethod
    def of(cls, row: RowSampling, vocab_size: int) -> _Row:
        """An id beyond the vocabulary would be written out of bounds: it is left out."""
        bias = {id: value for id, value in row.params.logit_bias.items() if 0 <= id < vocab_size}
        stop_ids = sorted(id for id in row.stop_ids if 0 <= id < vocab_size)
        return cls(row.params, bias, stop_ids, len(row.generated))


class Counts:
    """How often each id occurs in what a row has seen: `table`, int32 (rows, vocabulary).

    A row with a window counts its last ids alone. They are in `_recent` (rows, widest window): the
    id at position n of the row at index n % window, where the id at n + window replaces it.
    """

    def __init__(
        self, table: mx.array, windows: list[int], sizes: list[int], recent: mx.array | None
    ) -> None:
        self.table = table
        self._windows = windows  # 0: none
        self._sizes = sizes  # ids so far
        self._recent = recent  # None: no row has a window

    @classmethod
    def of(cls, contexts: Sequence[list[int]], windows: list[int], vocab_size: int) -> Counts:
        """Of the ids of each row so far. windows: how many count; 0: all."""
        table = mx.zeros((len(contexts), vocab_size), dtype=mx.int32)
        tails = [ids[-window:] for ids, window in zip(contexts, windows, strict=True)]
        if any(tails):
            rows = [row for row, tail in enumerate(tails) for _ in tail]
            table = table.at[mx.array(rows), mx.array([id for tail in tails for id in tail])].add(1)
        sizes = [len(ids) for ids in contexts]
        if not any(windows):
            return cls(table, windows, sizes, None)
        recent = [[0] * max(windows) for _ in contexts]
        for row, ids, window in zip(recent, contexts, windows, strict=True):
            for position in range(max(0, len(ids) - window), len(ids)):
                row[position % window] = ids[position]
        return cls(table, windows, sizes, mx.array(recent, dtype=mx.int32))

    def add(self, ids: mx.array) -> None:
        """Takes in one id per row, (rows,). Lazily: `ids` may not be known yet."""
        rows = mx.arange(len(ids))[:, None]
        ids = ids.astype(mx.int32)[:, None]
        if self._recent is None:
            self.table = self.table.at[rows, ids].add(1)
        else:
            pairs = list(zip(self._sizes, self._windows, strict=True))
            place = mx.array([[size % window if window else 0] for size, window in pairs])
            change = mx.array([[1, -1 if 0 < window <= size else 0] for size, window in pairs])
            oldest = mx.take_along_axis(self._recent, place, axis=-1)
            self.table = self.table.at[rows, mx.concatenate([ids, oldest], axis=-1)].add(change)
            self._recent = mx.put_along_axis(self._recent, place, ids, axis=-1)
        self._sizes = [size + 1 for size in self._sizes]

    def kept(self, keep: list[int]) -> Counts:
        rows = mx.array(keep, dtype=mx.int32)
        windows = [self._windows[index] for index in keep]
        recent = self._recent[rows] if self._recent is not None and any(windows) else None
        return Counts(self.table[rows], windows, [self._sizes[index] for index in keep], recent)

    def joined(self, other: Counts) -> Counts:
        return Counts(
            mx.concatenate([self.table, other.table]),
            self._windows + other._windows,
            self._sizes + other._sizes,
            _stacked(self._recent, other._recent, (len(self._sizes), len(other._sizes))),
        )


def _stacked(
    first: mx.array | None, second: mx.array | None, rows: tuple[int, int]
) -> mx.array | None:
    """What the rows of one had last, and below it the other; padded to the wider one."""
    if first is None and second is None:
        return None
    parts = [
        mx.zeros((number, 0), dtype=mx.int32) if part is None else part
        for part, number in zip((first, second), rows, strict=True)
    ]
    width = max(part.shape[1] for part in parts)
    padded = [mx.pad(part, [(0, 0), (0, width - part.shape[1])]) for part in parts]
    return mx.concatenate(padded)


def _joined(first: Counts | None, second: Counts | None, rows: tuple[int, int]) -> Counts | None:
    """The rows of one after those of the other; who has no table has counted nothing."""
    present = first or second
    if present is None:
        return None
    vocab_size = present.table.shape[1]
    parts = [
        counts or Counts.of([[]] * number, [0] * number, vocab_size)
        for counts, number in zip((first, second), rows, strict=True)
    ]
    return parts[0].joined(parts[1])


def _repeats(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0


def _weighs_output(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


def _column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype=dtype)[:, None]


@fused
def _weaken_seen(logits: mx.array, counts: mx.array, penalty: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    weakened = mx.where(logits < 0, logits * penalty, logits / penalty)
    return mx.where(counts > 0, weakened, logits)


@fused
def _weaken_output(
    logits: mx.array, counts: mx.array, presence: mx.array, frequency: mx.array
) -> mx.array:
    return logits.astype(mx.float32) - (frequency * counts + presence * (counts > 0))
