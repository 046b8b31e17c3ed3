"""Rows that decode together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlxq.worker.engine import caches
from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.logprobs import LazyLogprobs
from mlxq.worker.engine.prefill import Ready
from mlxq.worker.engine.request import Logprob, Output
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions, quantised
from mlxq.worker.engine.sampling import Sampling

LEFT_SHARE = 16
"""One in so many rows may be one that left."""


class _Ids(NamedTuple):
    """The newest id of every row, (rows,), which no step has read.

    known    rows of which the host has it: it ends their prompt, or was put out already
    reports  what was reported of the others, by the rows of then
    """

    ids: mx.array
    known: frozenset[Row]
    reports: list[tuple[list[Row], LazyLogprobs]]


class DecodeBatch:
    """Rows that decode together, with one step in flight. Engine thread only.

    `launch` sets the next step going, from ids the host need not know; `read` then waits for the
    step before. So the device has work while the host turns ids into outputs.

    A single row keeps the cache of its prefill; from the second on they are merged. Quantised
    layers are made of those of single rows.

    To take rows out of the arrays copies all others, and the host waits for the step in flight. So
    rows that left stay there until they are one in LEFT_SHARE; their ids are ignored.

    rows  those that have not left; one that has ended stays until `leave`
    """

    def __init__(self, network: Any, options: CacheOptions | None = None) -> None:
        self._network = network
        self._kv_bits = options.kv_bits if options else None
        self._clear()

    def _clear(self) -> None:
        self.rows: list[Row] = []
        self._places: list[Row] = []  # in the order of the arrays
        self._cache: Cache = []
        self._merged = False
        self._sampling: Sampling | None = None
        self._newest: _Ids | None = None
        self._due: _Ids | None = None

    @property
    def holds_nothing(self) -> bool:
        """Whether a row's first step is to come with nothing read before it.

        It must be alone in that: some recurrent layers treat the first id of all in another way.
        """
        return any(row.length == 1 and row in self._known for row in self.rows)

    @property
    def kv_bytes(self) -> int:
        return caches.kv_bytes(self._cache)

    def join(self, ready: Ready) -> None:
        """Takes in rows that have read all but their last id, between a read and a launch."""
        rows, cache, merged = ready
        if self._kv_bits is not None:
            cache = quantised(cache, self._kv_bits)
        sampling = Sampling.of([row.sampling for row in rows], self._network.vocab_size)
        last = mx.array([row.ids[-1] for row in rows], mx.int32)
        self._take_in(rows, cache, merged, sampling, _Ids(last, frozenset(rows), []))

    def absorb(self, other: DecodeBatch) -> None:
        """Takes in the rows of another batch, which is empty then; between a read and a launch."""
        other._tidy()
        if other._sampling is not None and other._newest is not None:
            rows, cache, merged = other.rows, other._cache, other._merged
            self._take_in(rows, cache, merged, other._sampling, other._newest)
        other._clear()

    def launch(self) -> bool:
        """Sets a step going for all rows. False if none is needed: the unread ids end them all."""
        if self._sampling is None or self._newest is None:
            return False
        newest = self._newest
        self._due = None if newest.known.issuperset(self.rows) else newest
        if all(row.left <= 1 and row not in newest.known for row in self.rows):
            self._newest = newest._replace(known=frozenset(self.rows))
            return False
        logits = self._network(newest.ids[:, None], cache=self._cache)[:, -1]
        drawn = self._sampling.draw(logits)
        reports = [] if drawn.logprobs is None else [(self._places, drawn.logprobs)]
        self._newest = _Ids(drawn.ids, frozenset(), reports)
        mx.async_eval(  # type: ignore[no-untyped-call]
            drawn.ids, drawn.logprobs.arrays if drawn.logprobs else []
        )
        return True

    def read(self) -> list[tuple[Row, Output]]:
        """Waits for the step before the one just launched; what each row got from it."""
        due, self._due = self._due, None
        return [] if due is None else self._outputs(due)

    def drain(self) -> list[tuple[Row, Output]]:
        """Waits for the step in flight, so that all rows stand where their outputs do."""
        newest = self._newest
        if newest is None or newest.known.issuperset(self.rows):
            return []
        self._newest = newest._replace(known=frozenset(self.rows))
        return self._outputs(newest)

    def step(self) -> list[Output]:
        """A launch, a read, and the rows that have ended leave."""
        self.launch()
        outputs = self.read()
        self.leave([row for row, output in outputs if output.finish])
        return [output for _, output in outputs]

    def leave(self, rows: Collection[Row]) -> None:
        """Drops these rows, between a read and the next launch."""
        gone = set(rows)
        self.rows = [row for row in self.rows if row not in gone]
        if not self.rows:
            self._clear()
        elif LEFT_SHARE * (len(self._places) - len(self.rows)) >= len(self._places):
            self._tidy()

    def extract(self, rows: Sequence[Row]) -> list[tuple[Cache, int]]:
        """For these rows their own cache, evaluated, and how many of their ids it holds."""
        if self._merged:
            found = caches.extract(self._cache, [self._places.index(row) for row in rows])
        else:
            found = [self._cache for _ in rows]
            mx.eval(caches.arrays(self._cache))
        return [(cache, self._held(row)) for cache, row in zip(found, rows, strict=True)]

    def lend(self, row: Row) -> tuple[Cache, int, int | None]:
        """The cache a row is in, how many of its ids that holds, and its place; None: its own."""
        return self._cache, self._held(row), self._places.index(row) if self._merged else None

    def _held(self, row: Row) -> int:
        """The last id that the host knows of is read by the step in flight, if there is one."""
        return row.length - (row in self._known)

    @property
    def _known(self) -> frozenset[Row]:
        return frozenset() if self._newest is None else self._newest.known

    def _tidy(self) -> None:
        """Takes the rows that left out of the arrays."""
        if self._sampling is None or self._newest is None or len(self.rows) == len(self._places):
            return
        staying = set(self.rows)
        stay = [index for index, row in enumerate(self._places) if row in staying]
        self._places = self.rows
        caches.keep(self._cache, stay)
        self._sampling.filter(stay)
        ids = self._newest.ids[mx.array(stay, mx.int32)]
        self._newest = self._newest._replace(ids=ids)

    def _take_in(
        self, rows: list[Row], cache: Cache, merged: bool, sampling: Sampling, newest: _Ids
    ) -> None:
        if self._sampling is None or self._newest is None:
            self._cache, self._merged = cache, merged
            self._sampling, self._newest = sampling, newest
        else:
            if not self._merged:
                self._cache, self._merged = caches.merge([self._cache]), True
            caches.extend(self._cache, cache if merged else caches.merge([cache]))
            self._sampling.extend(sampling)
            self._newest = _Ids(
                mx.concatenate([self._newest.ids, newest.ids]),
                self._newest.known | newest.known,
                self._newest.reports + newest.reports,
            )
        self.rows, self._places = self.rows + rows, self._places + rows

    def _outputs(self, drawn: _Ids) -> list[tuple[Row, Output]]:
        logprobs: dict[Row, Logprob] = {}
        for rows, lazy in drawn.reports:
            logprobs.update((rows[index], value) for index, value in lazy.read().items())
        ids = cast(list[int], drawn.ids.tolist())
        passed_over = set(self._places).difference(self.rows) | drawn.known
        outputs = []
        for row, id in zip(self._places, ids, strict=True):
            if row in passed_over:
                continue
            finish = row.take(id)
            new = [] if finish == "stop" else [id]
            report = logprobs.get(row) if logprobs else None
            reported = None if report is None else [report][: len(new)]
            outputs.append((row, Output(row.key, new, finish, logprobs=reported)))
        return outputs
