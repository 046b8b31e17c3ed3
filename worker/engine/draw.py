"""Draws ids from weights: all rows of a batch in one call, nothing waits for the device.

Weights are float32 (rows, blocks, length), a vocabulary cut into blocks, not normalised; an id of
weight 0 is never drawn. The vocabulary is never sorted. A row's result depends on its own weights
and numbers alone, bit by bit: every sum runs over the last axis, whose order is the same for any
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import mlx.core as mx

MOST_BLOCK = 512
LEAST_BLOCK = 64
NUMBERS = 32
"""Uniform numbers of each kind per key, always made together: how many are used changes none."""

MISS = 1e-9
"""How likely a row may find no id of its nucleus; it then takes its most probable one."""

_DEEPEST = 5
_TOP_P_OF_ROUNDS = (0.1, 0.012, 0.0012, 1.1e-4, 8e-6)
"""The least top-p that 2, 3, ... rounds do for; 7 do for all, as vocabularies end somewhere."""

_Function = TypeVar("_Function", bound=Callable[..., mx.array])


def fused(function: _Function) -> _Function:
    """Compiled to one kernel, for any batch size. Elementwise functions only."""
    return cast(_Function, mx.compile(function, shapeless=True))


class Some(NamedTuple):
    """Some rows of a batch; `indices` None: all of them, and nothing is copied."""

    indices: mx.array | None

    @classmethod
    def of(cls, chosen: Sequence[bool]) -> Some:
        if all(chosen):
            return cls(None)
        return cls(mx.array([row for row, is_chosen in enumerate(chosen) if is_chosen], mx.int32))

    def take(self, values: mx.array) -> mx.array:
        return values if self.indices is None else values[self.indices]

    def put(self, values: mx.array, part: mx.array) -> mx.array:
        """`values` (rows, 1) with `part` in the place of these rows."""
        if self.indices is None:
            return part
        return mx.put_along_axis(values, self.indices[:, None], part, axis=0)


def in_blocks(values: mx.array, pad: float, most: int = MOST_BLOCK) -> mx.array:
    """(rows, vocabulary) as (rows, blocks, length): a view, unless the vocabulary is odd.

    The length is the largest power of two that divides the vocabulary, up to `most`. Nearly all
    models have a multiple of 64; another is filled up with `pad`.
    """
    rows, size = values.shape
    length = max(LEAST_BLOCK, min(size & -size, most))
    if size % length:
        values = mx.pad(values, [(0, 0), (0, -size % length)], constant_values=pad)
    return values.reshape(rows, -1, length)


def uniform(keys: mx.array, round: int) -> mx.array:
    """Numbers in [0, 1), float32 (rows, 2, NUMBERS), from one key of 64 bits, (rows, 2), a row."""
    keys = keys ^ mx.array([0, round], mx.uint32)
    return mx.vmap(_numbers)(keys)


def mass_of(weights: mx.array) -> mx.array:
    """The sum of each row, (rows, 1)."""
    return weights.sum(axis=-1).sum(axis=-1, keepdims=True)


def draw(weights: mx.array, numbers: mx.array) -> tuple[mx.array, mx.array]:
    """Independent draws: ids int32 (rows, n) and their weights, from numbers (rows, 2, n).

    Inverse transform in two levels: a block by its sum, then an id of it. That reads the
    vocabulary once, and small weights keep their precision, which one long running sum would eat.
    A row without weight, or with a weight that is not finite, draws id 0 of weight 0 or NaN.
    """
    block = _choose(weights.sum(axis=-1)[:, None], numbers[:, 0])
    inside = mx.take_along_axis(weights, block[:, :, None], axis=1)
    place = _choose(inside, numbers[:, 1])
    drawn = mx.take_along_axis(inside, place[:, :, None], axis=-1)[:, :, 0]
    return block * weights.shape[-1] + place, drawn


class NucleusPlan(NamedTuple):
    """How many rounds of 2**depth - 1 draws; plans are ordered, the larger does for both."""

    rounds: int
    depth: int

    @property
    def draws(self) -> int:
        return self.rounds * ((1 << self.depth) - 1)

    @classmethod
    def of(cls, top_p: float) -> NucleusPlan:
        """Finds an id of the nucleus with a probability of 1 - MISS, whatever the weights."""
        for depth in range(1, _DEEPEST + 1):
            if (1.0 - top_p) ** (2**depth - 1) <= MISS:
                return cls(1, depth)
        return cls(2 + sum(top_p < least for least in _TOP_P_OF_ROUNDS), _DEEPEST)


def draw_nucleus(
    weights: mx.array, mass: mx.array, most: mx.array, plan: NucleusPlan, keys: mx.array
) -> tuple[mx.array, mx.array]:
    """One draw per row from its nucleus: ids int32 (rows, 1), and whether one was found.

    The nucleus holds every id with less than `mass` (rows, 1) of weight above it: the fewest ids
    that reach `mass`, ties whole. Instead of searching for its bound among all weights, this draws
    a few ids, of which the first that lies in the nucleus has exactly the distribution wanted
    (rejection, as in FlashInfer, https://arxiv.org/abs/2501.01005). What lies in the nucleus is
    heavier than what does not, so `depth` sums over the vocabulary tell for 2**depth - 1 draws.
    If none does, the next round draws among what is heavier than all of them.

    most   draws a row may use, (rows, 1): its own number, so that batch mates do not change it
    plan   rounds and depth that suffice for all rows
    """
    count = 2**plan.depth - 1
    ids = mx.zeros(mass.shape, dtype=mx.int32)
    found = mx.zeros(mass.shape, dtype=mx.bool_)
    for round in range(plan.rounds):
        drawn, heights = draw(weights, uniform(keys, round)[:, :, :count])
        usable = (heights > 0) & (mx.arange(count) < most - round * count)
        inside = usable & (heights >= _nucleus_bound(weights, heights, mass, plan.depth))
        first = mx.take_along_axis(drawn, mx.argmax(inside, axis=-1, keepdims=True), axis=-1)
        ids = mx.where(found, ids, first)
        found = found | inside.any(axis=-1, keepdims=True)
        if round + 1 < plan.rounds:
            outside = mx.where(usable & ~inside, heights, 0.0).max(axis=-1, keepdims=True)
            weights = _above(weights, outside[:, :, None])
    return ids, found


def largest(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row of (rows, vocabulary), best first, and their ids.

    They lie in the `count` blocks whose own largest values are largest, so only those are ranked.
    """
    count = min(count, values.shape[-1])
    blocks = in_blocks(values, -mx.inf, LEAST_BLOCK)
    rows, number, length = blocks.shape
    ids = mx.arange(number * length, dtype=mx.int32).reshape(1, number, length)
    if count < number:
        best = mx.argpartition(-blocks.max(axis=-1), count - 1, axis=-1)[:, :count, None]
        blocks = mx.take_along_axis(blocks, best, axis=1)
        ids = best.astype(mx.int32) * length + ids[:, 0]
    values = blocks.reshape(rows, -1)
    ids = mx.broadcast_to(ids, blocks.shape).reshape(rows, -1)
    best = mx.argpartition(-values, count - 1, axis=-1)[:, :count]
    values, ids = (mx.take_along_axis(each, best, axis=-1) for each in (values, ids))
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(values, order, axis=-1), mx.take_along_axis(ids, order, axis=-1)


def _numbers(key: mx.array) -> mx.array:
    return mx.random.uniform(shape=(2, NUMBERS), key=key)


def _choose(weights: mx.array, numbers: mx.array) -> mx.array:
    """Indices int32 (rows, n) into the last axis of (rows, 1 or n, size), by inverse transform.

    The least index whose running sum reaches its share. A parallel running sum may err by a last
    bit, so an index without weight is ruled out by itself.
    """
    reach = mx.cumsum(weights, axis=-1)
    score = _score(weights, reach, numbers[:, :, None] * reach[:, :, -1:])
    return mx.argmax(score, axis=-1).astype(mx.int32)


def _nucleus_bound(weights: mx.array, heights: mx.array, mass: mx.array, depth: int) -> mx.array:
    """Of `heights`, (rows, 2**depth - 1), the least with less than `mass` above; (rows, 1).

    Infinite if there is none.
    """
    ranked = mx.pad(mx.sort(heights, axis=-1), [(0, 0), (0, 1)], constant_values=mx.inf)
    outside = mx.zeros(mass.shape, dtype=mx.int32)  # how many have too much above: the first ones
    for half in (2**step for step in reversed(range(depth))):
        height = mx.take_along_axis(ranked, outside + (half - 1), axis=-1)
        above = mass_of(_above(weights, height[:, :, None]))
        outside = outside + half * (above >= mass)
    return mx.take_along_axis(ranked, outside, axis=-1)


@fused
def _score(weights: mx.array, reach: mx.array, share: mx.array) -> mx.array:
    return mx.where(weights > 0, mx.where(reach >= share, 2, 1), 0).astype(mx.uint8)


@fused
def _above(weights: mx.array, height: mx.array) -> mx.array:
    return mx.where(weights > height, weights, 0.0)
