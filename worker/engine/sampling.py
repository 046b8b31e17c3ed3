"""From the logits of a step to the next id of every row: one call for the whole batch.

Order, as in vLLM and Hugging Face: penalties, logit bias, min_tokens, temperature, top-k, top-p,
min-p, draw. A stage is computed only for the rows that ask for it. A row's ids depend on its own
logits, parameters and seed alone: neither its batch mates nor a change of worker alters them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import mlx.core as mx

from mlxq.worker.engine.draw import (
    NucleusPlan,
    Some,
    draw,
    draw_nucleus,
    fused,
    in_blocks,
    largest,
    mass_of,
    uniform,
)
from mlxq.worker.engine.logprobs import LazyLogprobs
from mlxq.worker.engine.penalties import Penalties, RowSampling
from mlxq.worker.engine.request import SamplingParams

__all__ = ["Drawn", "RowSampling", "Sampling", "row_key"]

_COLDEST = 1e-5  # below it, dividing by the temperature overflows float32


Key = tuple[int, int]
"""64 bits for the random numbers of one id, as two words."""


class Drawn(NamedTuple):
    """The next ids, not computed yet: int32 (rows,), and the report of the rows that ask."""

    ids: mx.array
    logprobs: LazyLogprobs | None


class Sampling:
    """Parameters, seeds and counts of the rows of a batch, in its order. Engine thread only.

    The n-th id of a row is drawn with the n-th key of its seed, n counted from its first output
    id on any worker.
    """

    def __init__(self, params: list[SamplingParams], keys: list[Key], penalties: Penalties) -> None:
        self._params = params
        self._keys = keys  # of the next ids, when the plan was made
        self._penalties = penalties
        self._plan: _Plan | None = None
        self._steps = 0  # since the plan was made

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> Sampling:
        """For rows whose next ids stand at position `len(row.generated)` of their output.

        vocab_size: the last dimension of the logits
        """
        keys = [row_key(row.params.seed, len(row.generated)) for row in rows]
        return cls([row.params for row in rows], keys, Penalties.of(rows, vocab_size))

    def extend(self, other: Sampling) -> None:
        """Takes in the rows of `other`, behind its own. `other` must not be used any more."""
        self._keys = self._next_keys() + other._next_keys()
        self._params = self._params + other._params
        self._penalties.extend(other._penalties)
        self._plan = None

    def filter(self, keep: list[int]) -> None:
        """Keeps the rows of these indices, in this order."""
        keys = self._next_keys()
        self._keys = [keys[index] for index in keep]
        self._params = [self._params[index] for index in keep]
        self._penalties.filter(keep)
        self._plan = None

    def draw(self, logits: mx.array) -> Drawn:
        """Chooses an id per row from logits (rows, vocabulary) of any float type, and counts it.

        Nothing is computed yet, and nothing raises whatever the logits hold. A row with a logit of
        +inf, or without one above -inf, gets its (first) largest.
        """
        if self._plan is None:
            self._plan = _Plan.of(self._params, self._keys, logits.shape[-1])
            self._steps = 0
        logits = self._penalties.apply(logits)
        ids = self._plan.draw(logits, self._steps)
        self._steps += 1
        self._penalties.count(ids)
        asking = self._plan.logprobs
        return Drawn(ids, LazyLogprobs.of(logits, ids, asking) if asking else None)

    def _next_keys(self) -> list[Key]:
        if self._plan is None:
            return self._keys
        return [((first + self._steps) % 2**32, second) for first, second in self._keys]


def row_key(seed: int, position: int) -> Key:
    """What the `position`-th id of a seed is drawn with, as two words.

    The seed is hashed, so that near seeds share nothing; positions are counted up from there, as
    MLX's generator (Threefry) is made for.
    """
    digest = hashlib.blake2b((seed % 2**64).to_bytes(8, "little"), digest_size=8).digest()
    first, second = digest[:4], digest[4:]
    return (int.from_bytes(first, "little") + position) % 2**32, int.from_bytes(second, "little")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a step has to compute for the rows of a batch; made anew when one joins or leaves.

    keys, temperature, top_k, top_p and min_p have a row for each of the sampled rows alone.
    """

    sampled: Some | None
    keys: mx.array  # uint32 (rows, 2), of the first step
    temperature: mx.array
    top_k: _TopK | None
    top_p: _TopP | None
    min_p: mx.array | None
    logprobs: dict[int, int]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], keys: Sequence[Key], vocab_size: int) -> _Plan:
        is_sampled = [not _greedy(each) for each in params]
        sampled = list(compress(params, is_sampled))
        min_p = [each.min_p for each in sampled]
        return cls(
            sampled=Some.of(is_sampled) if sampled else None,
            keys=mx.array(list(compress(keys, is_sampled)), dtype=mx.uint32),
            temperature=_column([each.temperature for each in sampled]),
            top_k=_TopK.of(sampled, vocab_size),
            top_p=_TopP.of(sampled),
            min_p=_column(min_p)[:, :, None] if any(min_p) else None,
            logprobs={
                row: each.logprobs for row, each in enumerate(params) if each.logprobs is not None
            },
        )

    def draw(self, logits: mx.array, step: int) -> mx.array:
        """Ids int32 (rows,) of the step-th step; a greedy row gets the first of its largest."""
        best = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.int32)
        if self.sampled is None:
            return best[:, 0]
        keys = self.keys + mx.array([step, 0], dtype=mx.uint32)
        ids = self._sample(self.sampled.take(logits), self.sampled.take(best), keys)
        return self.sampled.put(best, ids)[:, 0]

    def _sample(self, logits: mx.array, best: mx.array, keys: mx.array) -> mx.array:
        """Ids (sampled rows, 1); `best` where nothing can be drawn."""
        floor = mx.array([[-mx.inf]]) if self.top_k is None else self.top_k.floor(logits)
        peak = mx.take_along_axis(logits, best, axis=-1)
        weights = in_blocks(_weights(logits, peak, self.temperature, floor), 0.0)
        mass = mass_of(weights)  # before min-p; not computed unless top-p needs it
        if self.min_p is not None:
            weights = _at_least(weights, self.min_p)
        ids = best
        if self.top_p is None or self.top_p.rows.indices is not None:
            drawn, heights = draw(weights, uniform(keys, 0)[:, :, :1])
            ids = mx.where(heights > 0, drawn, ids)
        if self.top_p is not None:
            found = self.top_p.draw(*map(self.top_p.rows.take, (weights, mass, best, keys)))
            ids = self.top_p.rows.put(ids, found)
        return ids


@dataclass(frozen=True, slots=True)
class _TopK:
    """The rows that cut by rank."""

    rows: Some
    ranks: mx.array  # (rows, 1)
    most: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> _TopK | None:
        ranks = [each.top_k if each.top_k < vocab_size else 0 for each in params]
        if not any(ranks):
            return None
        column = mx.array([rank for rank in ranks if rank])[:, None]
        return cls(Some.of([rank > 0 for rank in ranks]), column, max(ranks))

    def floor(self, logits: mx.array) -> mx.array:
        """The least logit that stays, float32 (all rows, 1); its equals stay too."""
        values, _ = largest(self.rows.take(logits), self.most)
        kept = mx.take_along_axis(values, self.ranks - 1, axis=-1).astype(mx.float32)
        return self.rows.put(mx.full((len(logits), 1), -mx.inf), kept)


@dataclass(frozen=True, slots=True)
class _TopP:
    """The rows that cut by mass."""

    rows: Some
    shares: mx.array  # (rows, 1)
    draws: mx.array  # (rows, 1)
    plan: NucleusPlan

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> _TopP | None:
        shares = [each.top_p for each in params if each.top_p < 1.0]
        if not shares:
            return None
        plans = [NucleusPlan.of(share) for share in shares]
        draws = mx.array([plan.draws for plan in plans])[:, None]
        rows = Some.of([each.top_p < 1.0 for each in params])
        return cls(rows, _column(shares), draws, max(plans))

    def draw(self, weights: mx.array, mass: mx.array, best: mx.array, keys: mx.array) -> mx.array:
        """Ids (rows, 1). mass: of all weights before min-p; best: most probable ids."""
        ids, found = draw_nucleus(weights, self.shares * mass, self.draws, self.plan, keys)
        return mx.where(found, ids, best)


def _greedy(params: SamplingParams) -> bool:
    return params.temperature < _COLDEST or params.top_k == 1


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


@fused
def _weights(logits: mx.array, peak: mx.array, temperature: mx.array, floor: mx.array) -> mx.array:
    """Probabilities over that of the best id; 0 below `floor`."""
    logits = logits.astype(mx.float32)
    weights = mx.exp((logits - peak.astype(mx.float32)) / temperature)
    return mx.where(logits >= floor, weights, 0.0)


@fused
def _at_least(weights: mx.array, least: mx.array) -> mx.array:
    return mx.where(weights >= least, weights, 0.0)
