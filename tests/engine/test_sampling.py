"""The draw of a whole batch: against plain numpy, and each row against itself alone."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxq.worker.engine.draw import (
    MISS,
    NucleusPlan,
    _nucleus_bound,
    draw,
    draw_nucleus,
    in_blocks,
    largest,
)
from mlxq.worker.engine.request import SamplingParams
from mlxq.worker.engine.sampling import Drawn, RowSampling, Sampling, row_key

Array = np.ndarray[Any, np.dtype[np.float64]]
LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0])
ROWS = 1_000


def sampling(*params: SamplingParams, vocab_size: int, generated: int = 0) -> Sampling:
    rows = [RowSampling(each, [0], [0] * generated, frozenset()) for each in params]
    return Sampling.of(rows, vocab_size)


def ids_of(drawn: Drawn) -> list[int]:
    return [int(id) for id in np.array(drawn.ids)]


def many_ids(logits: Array, params: SamplingParams, rows: int = ROWS) -> list[int]:
    """Ids that `rows` rows of different seeds draw from the same logits."""
    row = {name: getattr(params, name) for name in params.__slots__}
    seeds = [SamplingParams(**(row | {"seed": seed})) for seed in range(rows)]
    batch = sampling(*seeds, vocab_size=len(logits))
    repeated = mx.broadcast_to(mx.array(logits.astype(np.float32)), (rows, len(logits)))
    return ids_of(batch.draw(repeated))


def reference(logits: Array, params: SamplingParams) -> Array:
    """The distribution in float64, by sorting."""
    scaled = (logits - logits.max()) / params.temperature
    if params.top_k:
        scaled[scaled < np.sort(scaled)[::-1][: params.top_k].min()] = -np.inf
    weights = np.exp(scaled)
    shares = weights / weights.sum()
    above = np.array([shares[shares > share].sum() for share in shares])
    kept = (above < params.top_p) & (shares >= params.min_p * shares.max())
    distribution: Array = np.where(kept, shares, 0.0)
    distribution /= distribution.sum()
    return distribution


def assert_drawn_from(ids: Sequence[int], distribution: Array) -> None:
    """Nothing but the support, and a chi-square statistic within 5 standard deviations."""
    found = np.bincount(ids, minlength=len(distribution))
    assert not np.any(found[distribution == 0])
    expected = len(ids) * distribution[distribution > 0]
    found = found[distribution > 0]
    few = expected < 5  # taken together: the statistic needs some of each kind
    if few.any():
        found = np.append(found[~few], found[few].sum())
        expected = np.append(expected[~few], expected[few].sum())
    freedom = max(1, len(expected) - 1)
    assert ((found - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom) + 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=3),
        SamplingParams(top_k=8),
        SamplingParams(top_k=20),
        SamplingParams(top_k=2**31 - 1),
        SamplingParams(top_p=1e-9),
        # 0.405 0.246 0.149 ...: the first two have 0.651, so 0.64 keeps two and 0.66 three.
        SamplingParams(top_p=0.64),
        SamplingParams(top_p=0.66),
        SamplingParams(top_p=0.97),
        SamplingParams(top_p=0.9999),
        SamplingParams(min_p=1.0),
        # Ids within ln(10) of the best: 2.0 down to -0.30.
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=0.1, temperature=2.0),
        # Top-p counts what top-k left: of 0.506 0.307 0.186, two reach 0.8.
        SamplingParams(top_k=3, top_p=0.8),
        # Top-p counts what min-p takes: of 0.405 0.246 0.149 0.09, the first three have 0.8.
        SamplingParams(min_p=0.2, top_p=0.85),
        SamplingParams(min_p=0.4, top_p=0.5, top_k=7, temperature=1.3),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    assert_drawn_from(many_ids(LOGITS, params), reference(LOGITS, params))


def spread(size: int, scale: float, seed: int = 0) -> Array:
    """Normal logits that bfloat16 holds exactly."""
    logits = np.random.default_rng(seed).normal(size=size) * scale
    return np.array(mx.array(logits).astype(mx.bfloat16).astype(mx.float32)).astype(np.float64)


def one_hot(size: int) -> Array:
    logits = np.full(size, -1e4)
    logits[size // 3] = 1e4
    return logits


HARD = {
    "spread": spread(256, 2.0),
    "peaked": spread(320, 8.0),
    "flat": np.zeros(300),
    "nearly flat": 1e-3 * spread(300, 1.0),
    "odd size": spread(397, 3.0),
    "few values": np.repeat(np.arange(10.0), 32) / 2,
    "masked": np.where(np.arange(256) % 3, -np.inf, spread(256, 2.0)),
    "one hot": one_hot(192),
    "huge": np.linspace(-3e38, 3e38, 192),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_p=0.3),
        SamplingParams(top_p=0.02),
        SamplingParams(top_k=20, top_p=0.95),
        SamplingParams(top_k=150, min_p=0.05),
    ],
)
def test_hard_logits(name: str, params: SamplingParams) -> None:
    with np.errstate(over="ignore"):
        assert_drawn_from(many_ids(HARD[name], params), reference(HARD[name], params))


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=2), SamplingParams(top_p=1e-3), SamplingParams(min_p=1.0)]
)
def test_equal_ids_stay_together(params: SamplingParams) -> None:
    logits = np.where(np.arange(100) % 10, 0.0, 1.5)
    assert_drawn_from(many_ids(logits, params), (np.arange(100) % 10 == 0) / 10)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.1, 1.0, 4.0, 30.0])
def test_the_bound_of_the_nucleus_is_that_of_a_sorted_row(scale: float) -> None:
    rows, depth = 200, 8
    size = 2**depth - 1
    rng = np.random.default_rng(int(1e4 * scale))
    rounded = mx.array(rng.normal(size=(rows, size)) * scale).astype(mx.bfloat16)
    weights = mx.exp(rounded.astype(mx.float32) - rounded.astype(mx.float32).max(-1, keepdims=True))
    exact = np.array(weights).astype(np.float64)
    share = rng.uniform(0.01, 0.999, size=(rows, 1))
    mass = share * exact.sum(axis=-1, keepdims=True)
    ranked = -np.sort(-exact, axis=-1)
    above = np.cumsum(ranked, axis=-1) - ranked
    for row in range(rows):  # equal weights have equal weight above
        _, first, same = np.unique(-ranked[row], return_index=True, return_inverse=True)
        above[row] = above[row][first[same]]
    clear = np.abs(above / mass - 1).min(axis=-1) > 1e-6  # else float32 may see it otherwise
    expected = np.where(above < mass, ranked, np.inf).min(axis=-1)
    bound = _nucleus_bound(in_blocks(weights, 0.0), weights, mx.array(mass, mx.float32), depth)
    assert clear.mean() > 0.95
    assert np.array_equal(np.array(bound)[clear, 0], expected[clear].astype(np.float32))


def test_no_number_draws_an_id_without_weight() -> None:
    weights = np.zeros((1, 5 * 64), dtype=np.float32)
    weights[0, [70, 71, 100, 200]] = [1.0, 1e-20, 2.0, 1.0]
    extremes = np.array([0.0, 1e-7, 0.25, 0.75, 1 - 2.0**-24], dtype=np.float32)
    numbers = mx.array(np.stack(np.meshgrid(extremes, extremes)).reshape(1, 2, -1))
    ids, heights = draw(in_blocks(mx.array(weights), 0.0), numbers)
    assert set(np.array(ids)[0]) == {70, 100, 200}
    assert np.array_equal(np.array(heights), weights[:, np.array(ids)[0]])


@pytest.mark.parametrize(("share", "bound"), [(0.499, 4.0), (0.5, 4.0), (0.501, 2.0), (0.9, 1.0)])
def test_the_nucleus_is_full_when_its_mass_is_reached(share: float, bound: float) -> None:
    weights = mx.array([[1.0, 4.0, 2.0] + [1.0] + [0.0] * 60])
    found = _nucleus_bound(in_blocks(weights, 0.0), weights[:, :3], mx.array([[8 * share]]), 2)
    assert found.item() == bound


def test_a_row_uses_no_more_draws_than_its_own() -> None:
    """Else a mate with a lower top-p could change what it draws."""
    weights = in_blocks(mx.ones((4, 256)), 0.0)
    mass = mx.full((4, 1), 1e-3)  # of 256 equal ids: all of them
    keys = mx.array([[1, 1]] * 4, dtype=mx.uint32)
    most = mx.array([[0], [1], [7], [62]])
    ids, found = draw_nucleus(weights, mass, most, NucleusPlan(2, 5), keys)
    assert found[:, 0].tolist() == [False, True, True, True]
    assert len(np.unique(np.array(ids[1:]))) == 1


@pytest.mark.parametrize("top_p", [0.999, 0.95, 0.9, 0.75, 0.7, 0.5, 0.48, 0.1, 0.05, 0.012, 1e-3])
def test_the_nucleus_is_hardly_ever_missed(top_p: float) -> None:
    """By integration: ids outside the nucleus, `rest` times as likely, are never the last left."""
    plan = NucleusPlan.of(top_p)
    draws = 2**plan.depth - 1
    quantiles = 1 - (1 - (np.arange(2_000) + 0.5) / 2_000) ** (1 / draws)
    rests = np.geomspace(1e-12, 2e3, 600)  # after a round: times the least of `draws` numbers
    missed = (rests / (1 + rests)) ** draws
    for _ in range(plan.rounds - 1):
        later = np.interp(rests[:, None] * quantiles, rests, missed).mean(axis=1)
        missed = (rests / (1 + rests)) ** draws * later
    assert np.interp((1 - top_p) / top_p, rests, missed) < 3 * MISS  # 3: a coarse grid


@pytest.mark.parametrize("size", [1, 5, 64, 997, 4096])
@pytest.mark.parametrize("count", [1, 3, 50, 5000])
def test_largest(size: int, count: int) -> None:
    values = np.random.default_rng(size).normal(size=(4, size)).astype(np.float32)
    values[1] = 1.0
    values[2, ::2] = -np.inf
    best, ids = (np.array(each) for each in largest(mx.array(values), count))
    assert np.array_equal(best, -np.sort(-values, axis=-1)[:, :count])
    assert np.array_equal(np.take_along_axis(values, ids, axis=-1), best)
    assert all(len(set(row)) == min(count, size) for row in ids.tolist())


MIXED = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0.0, seed=2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, logprobs=4),
    SamplingParams(temperature=1.7, top_p=0.3, seed=4),
    SamplingParams(top_k=7, seed=5),
    SamplingParams(top_k=90, top_p=0.99, min_p=0.02, seed=6),
    SamplingParams(min_p=0.1, seed=7, logprobs=0),
    SamplingParams(top_p=0.01, temperature=3.0, seed=8),
    SamplingParams(repetition_penalty=1.3, repetition_window=2, seed=9),
    SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, top_p=0.8, seed=10),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2),
    SamplingParams(logit_bias={3: 2.0, 9: -100.0}, min_tokens=3, seed=11),
]
SIZE = 640
STEPS = 6


def logits_of(row: int, step: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """(1, SIZE); rather flat, so that another random number is another id."""
    key = mx.random.key(100 * row + step)
    return (mx.random.normal((1, SIZE), key=key) * 1.5).astype(dtype)


def run_alone(row: int, steps: int = STEPS) -> list[int]:
    start = RowSampling(MIXED[row], [4, 5, 4], [], frozenset({6}))
    batch = Sampling.of([start], SIZE)
    return [ids_of(batch.draw(logits_of(row, step)))[0] for step in range(steps)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return [run_alone(row) for row in range(len(MIXED))]


@pytest.mark.parametrize("order", [1, 5, 7])
def test_a_row_is_the_same_with_any_mates(alone: list[list[int]], order: int) -> None:
    """Rows join one by one in different orders, each leaves after STEPS ids."""
    waiting = [row * order % len(MIXED) for row in range(len(MIXED))]
    batch, running, ids = Sampling.of([], SIZE), list[int](), dict[int, list[int]]()
    while waiting or running:
        joining, waiting = waiting[:2], waiting[2:]
        for row in joining:
            start = RowSampling(MIXED[row], [4, 5, 4], [], frozenset({6}))
            batch.extend(Sampling.of([start], SIZE))
            ids[row] = []
        running += joining
        logits = mx.concatenate([logits_of(row, len(ids[row])) for row in running])
        for row, id in zip(running, ids_of(batch.draw(logits)), strict=True):
            ids[row].append(id)
        keep = [index for index, row in enumerate(running) if len(ids[row]) < STEPS]
        keep.reverse()
        batch.filter(keep)
        running = [running[index] for index in keep]
    assert [ids[row] for row in range(len(MIXED))] == alone


@pytest.mark.parametrize("position", [1, 4])
def test_a_row_goes_on_where_it_was_cut(alone: list[list[int]], position: int) -> None:
    starts = [
        RowSampling(params, [4, 5, 4], ids[:position], frozenset({6}))
        for params, ids in zip(MIXED, alone, strict=True)
    ]
    batch = Sampling.of(starts, SIZE)
    for step in range(position, STEPS):
        logits = mx.concatenate([logits_of(row, step) for row in range(len(MIXED))])
        assert ids_of(batch.draw(logits)) == [ids[step] for ids in alone]


def test_the_precision_of_the_logits_changes_nothing_but_their_values() -> None:
    logits = mx.concatenate([logits_of(row, 0) for row in range(len(MIXED))])
    coarse = sampling(*MIXED, vocab_size=SIZE).draw(logits)
    fine = sampling(*MIXED, vocab_size=SIZE).draw(logits.astype(mx.float32))
    assert ids_of(coarse) == ids_of(fine)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3, seed=4),
        SamplingParams(temperature=2.0, top_k=1),
    ],
)
def test_greedy_is_the_first_of_the_largest(params: SamplingParams) -> None:
    logits = np.array(mx.random.normal((20, 5000), key=mx.random.key(1)).astype(mx.float32))
    rounded = mx.array(logits.round(1)).astype(mx.bfloat16)
    drawn = sampling(*[params] * 20, vocab_size=5000).draw(rounded)
    assert np.array_equal(drawn.ids, np.array(rounded.astype(mx.float32)).argmax(axis=-1))
    assert drawn.ids.dtype == mx.int32


def test_a_greedy_batch_computes_nothing_but_the_largest() -> None:
    greedy = SamplingParams(temperature=0.0, top_p=0.5, seed=3, min_tokens=9)
    logits = mx.array([[0.0] * SIZE] * 2)
    drawn = sampling(greedy, greedy, vocab_size=SIZE).draw(logits)
    assert drawn.logprobs is None
    assert nodes(drawn.ids) == 3  # and its type and shape


def nodes(array: mx.array) -> int:
    """How many operations stand between an array and what is known."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("rectangle")


@pytest.mark.parametrize("row", range(len(MIXED)))
def test_joins_and_departures_leave_no_graph_behind(row: int) -> None:
    """What no step computes would grow for as long as the worker runs."""
    starts = [RowSampling(MIXED[index], [1, 2], [], frozenset({6})) for index in (row, 1, 0, 8)]
    batch, seen = Sampling.of(starts[:1], SIZE), list[int]()
    for _ in range(8):
        for start in starts[1:]:
            batch.extend(Sampling.of([start], SIZE))
            batch.filter([0])
        drawn = batch.draw(logits_of(0, 0))
        seen.append(nodes(drawn.ids))
        mx.eval(drawn.ids)
    assert max(seen[4:]) <= max(seen[:4])


def test_a_very_low_temperature_neither_overflows_nor_errs() -> None:
    assert set(many_ids(LOGITS, SamplingParams(temperature=2e-5), rows=50)) == {0}


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=3, top_p=0.9, min_p=0.1), SamplingParams(logprobs=2)],
)
def test_broken_logits_neither_raise_nor_harm_another_row(params: SamplingParams) -> None:
    sound = spread(64, 1.0)
    rows = [np.full(64, value) for value in (np.nan, np.inf, -np.inf)] + [sound.copy()] * 3
    rows[3] = np.where(np.arange(64) == 5, np.inf, sound)
    rows[4] = np.where(np.arange(64) == 5, np.nan, sound)
    drawn = sampling(*[params] * 6, vocab_size=64).draw(mx.array(np.stack(rows), mx.float32))
    ids = ids_of(drawn)
    assert all(0 <= id < 64 for id in ids)
    assert ids[3] == 5
    solo = sampling(params, vocab_size=64).draw(mx.array(sound[None], mx.float32))
    assert ids[5:] == ids_of(solo)
    if drawn.logprobs is not None and solo.logprobs is not None:
        assert drawn.logprobs.read()[5] == solo.logprobs.read()[0]


def test_seeds_and_positions_share_nothing() -> None:
    seeds = (0, 1, 2, 2**32, 2**63 - 1)
    assert len({row_key(seed, position) for seed in seeds for position in range(50)}) == 250
    batch = sampling(*(SamplingParams(seed=seed) for seed in seeds), vocab_size=2**16)
    flat = mx.zeros((len(seeds), 2**16))
    ids = [id for _ in range(8) for id in ids_of(batch.draw(flat))]
    assert len(set(ids)) == len(ids)


def test_sampling_leaves_the_global_random_state_alone() -> None:
    before = str(mx.random.state)
    many_ids(LOGITS, SamplingParams(top_p=0.5), rows=3)
    assert str(mx.random.state) == before


def test_logprobs_are_of_the_distribution_before_temperature_and_cuts() -> None:
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.3, top_k=2, seed=2, logprobs=3),
        SamplingParams(temperature=0.0, logprobs=0, logit_bias={1: 4.0}),
        SamplingParams(top_p=0.5, logprobs=20),
    ]
    drawn = sampling(*params, vocab_size=8).draw(
        mx.broadcast_to(mx.array(LOGITS, mx.float32), (4, 8))
    )
    assert drawn.logprobs is not None
    mx.eval(drawn.ids, *drawn.logprobs.arrays)
    reports = drawn.logprobs.read()
    ids = ids_of(drawn)
    expected = np.log(reference(LOGITS, SamplingParams()))
    biased = np.log(reference(LOGITS + 4.0 * (np.arange(8) == 1), SamplingParams()))
    assert set(reports) == {1, 2, 3}
    assert reports[1].logprob == pytest.approx(expected[ids[1]], abs=1e-5)
    assert [id for id, _ in reports[1].top] == [0, 1, 2]
    assert [value for _, value in reports[1].top] == pytest.approx(expected[:3], abs=1e-5)
    assert reports[2].top == []
    assert ids[2] == 1
    assert reports[2].logprob == pytest.approx(biased[1], abs=1e-5)
    assert [id for id, _ in reports[3].top] == list(range(8))


def test_a_forbidden_id_is_no_alternative() -> None:
    params = SamplingParams(logprobs=8, min_tokens=1)
    row = RowSampling(params, [0], [], frozenset({0, 3}))
    drawn = Sampling.of([row], 8).draw(mx.array(LOGITS[None], mx.float32))
    assert drawn.logprobs is not None
    report = drawn.logprobs.read()[0]
    assert [id for id, _ in report.top] == [1, 2, 4, 5, 6, 7]
    assert report.logprob > -math.inf
