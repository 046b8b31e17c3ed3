"""The two batches that the engine benchmarks compare, step by step in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_model as load_raw

from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.request import Admit, RowKey, SamplingParams

PREFILL_STEP = 2048  # the most that either reads in a step; it is mlx-lm's own default
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """One row: prompt ids, how many ids it may make, how they are chosen."""

    prompt: list[int]
    tokens: int
    sampling: SamplingParams = GREEDY


class Side(Protocol):
    """A batch under test. Rows are numbered in the order of `admit`, from 0 after `clear`."""

    def admit(self, asks: Sequence[Ask]) -> None: ...

    def step(self) -> list[int]:
        """One step; the number of the row of each id that it gave."""
        ...

    def clear(self) -> None:
        """Drops all rows."""
        ...


class RawSide:
    """mlx-lm's BatchGenerator as it comes. It has no seeds: rows draw from the global state."""

    def __init__(self, folder: Path, max_batch: int) -> None:
        self._network, _ = load_raw(folder)
        self._max_batch = max_batch
        self.clear()

    def clear(self) -> None:
        self._numbers: dict[int, int] = {}
        self._generator = BatchGenerator(
            self._network,
            completion_batch_size=self._max_batch,
            prefill_step_size=PREFILL_STEP,
        )

    def admit(self, asks: Sequence[Ask]) -> None:
        uids = self._generator.insert(
            [ask.prompt for ask in asks],
            [ask.tokens for ask in asks],
            samplers=[raw_sampler(ask.sampling) for ask in asks],
            logits_processors=[raw_processors(ask.sampling) for ask in asks],
        )
        for uid in uids:
            self._numbers[uid] = len(self._numbers)

    def step(self) -> list[int]:
        _, responses = self._generator.next()
        return [self._numbers[response.uid] for response in responses]


def raw_sampler(params: SamplingParams) -> Any:
    if params.greedy:
        return None
    return make_sampler(params.temperature, params.top_p, params.min_p, top_k=params.top_k)


def raw_processors(params: SamplingParams) -> Any:
    return make_logits_processors(
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1 else None,
        presence_penalty=params.presence_penalty or None,
        frequency_penalty=params.frequency_penalty or None,
    )


class OwnSide:
    """The worker's own batch. `clear` keeps the prefix cache; benchmarks of it say so."""

    def __init__(self, folder: Path, max_batch: int, **options: Any) -> None:
        self._batch = load_batch(
            str(folder), max_batch=max_batch, prefill_step=PREFILL_STEP, **options
        )
        self._attempts = count(1)
        self._keys: list[RowKey] = []

    def admit(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            key = RowKey(str(len(self._keys)), next(self._attempts))
            self._keys.append(key)
            self._batch.admit(Admit(key, ask.prompt, [], ask.tokens, ask.sampling, frozenset()))

    def step(self) -> list[int]:
        rows: list[int] = []
        for output in self._batch.step():
            if output.finish == "error":
                raise RuntimeError(output.error)
            rows += [int(output.key.job_id)] * len(output.ids)
        return rows

    def clear(self) -> None:
        for key in self._keys:
            self._batch.cancel(key)
        self._keys = []
        while self._batch.busy:
            self._batch.step()


Makers = dict[str, Callable[[int], Side]]
"""By name: makes a side for so many slots."""


@dataclass(slots=True)
class Timeline:
    """When each row got its ids, in seconds from the start."""

    started_s: float = field(default_factory=time.perf_counter)
    at_s: dict[int, list[float]] = field(default_factory=dict)

    def step(self, side: Side) -> None:
        rows = side.step()
        now_s = time.perf_counter() - self.started_s
        for row in rows:
            self.at_s.setdefault(row, []).append(now_s)

    def run_until(self, side: Side, rows: Sequence[int], ids: int) -> None:
        """Steps until each of `rows` has `ids` ids."""
        while any(len(self.at_s.get(row, ())) < ids for row in rows):
            self.step(side)

    def first_s(self, rows: Sequence[int]) -> list[float]:
        return [self.at_s[row][0] for row in rows]


def prompts(rows: int, lengths: Sequence[int], vocab: int, seed: int) -> Iterator[list[int]]:
    """Random ids, the lengths in turn; no two alike."""
    choice = random.Random(seed)
    for row in range(rows):
        yield [choice.randrange(3, vocab) for _ in range(lengths[row % len(lengths)])]
