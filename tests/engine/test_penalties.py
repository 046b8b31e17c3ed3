"""Penalties, bias and min_tokens against plain numpy, over steps, joins and departures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxq.worker.engine.penalties import Penalties, RowSampling
from mlxq.worker.engine.request import SamplingParams

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0]
SIZE = len(LOGITS)
STOP_IDS = frozenset({3, 5, SIZE + 7})


def start(
    params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> RowSampling:
    return RowSampling(params, list(prompt), list(generated), STOP_IDS)


def applied(penalties: Penalties, rows: int = 1) -> list[list[float]]:
    logits = mx.broadcast_to(mx.array(LOGITS), (rows, SIZE))
    return [[float(value) for value in row] for row in np.array(penalties.apply(logits))]


def expected(row: RowSampling, output: Sequence[int]) -> list[float]:
    """The logits of a row that has put out `output`, by the definitions."""
    params, context = row.params, [*row.prompt, *output]
    seen = context[-params.repetition_window :] if params.repetition_window else context
    logits = dict(enumerate(LOGITS))
    for id in set(seen):
        strength = params.repetition_penalty
        logits[id] = logits[id] * strength if logits[id] < 0 else logits[id] / strength
    for id, count in Counter(output).items():
        logits[id] -= params.presence_penalty + count * params.frequency_penalty
    for id, value in params.logit_bias.items():
        if id in logits:
            logits[id] += value
    if len(output) < params.min_tokens:
        logits |= {id: -np.inf for id in STOP_IDS if id in logits}
    return [logits[id] for id in range(SIZE)]


def changed(**values: float) -> list[float]:
    """LOGITS with some entries replaced: `changed(_3=0.1)`."""
    row = list(LOGITS)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


@pytest.mark.parametrize(
    ("params", "row"),
    [
        (SamplingParams(), changed()),
        # Divided where positive, multiplied where negative, once per id, prompt included.
        (SamplingParams(repetition_penalty=2.0), changed(_0=1.0, _1=0.75, _6=-2.0)),
        (SamplingParams(repetition_penalty=2.0, repetition_window=1), changed(_1=0.75)),
        (SamplingParams(repetition_penalty=2.0, repetition_window=4), changed(_1=0.75, _6=-2.0)),
        (
            SamplingParams(repetition_penalty=2.0, repetition_window=99),
            changed(_0=1.0, _1=0.75, _6=-2.0),
        ),
        # Of the output [1, 6, 1] alone.
        (SamplingParams(presence_penalty=0.5), changed(_1=1.0, _6=-1.5)),
        (SamplingParams(frequency_penalty=0.5), changed(_1=0.5, _6=-1.5)),
        (
            SamplingParams(presence_penalty=-1.0, frequency_penalty=0.25),
            changed(_1=2.0, _6=-0.25),
        ),
        (SamplingParams(logit_bias={2: 1.5, 7: -100.0}), changed(_2=2.5, _7=-104.0)),
        (SamplingParams(logit_bias={2: 1.5, 8: 5.0, -1: 5.0}), changed(_2=2.5)),
        (
            SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, logit_bias={1: 3.0}),
            changed(_0=1.0, _1=3.25, _6=-2.5),
        ),
        (SamplingParams(min_tokens=3), changed()),
        (SamplingParams(min_tokens=4), changed(_3=-np.inf, _5=-np.inf)),
        (
            SamplingParams(min_tokens=4, logit_bias={3: 9.0, 4: 1.0}),
            changed(_3=-np.inf, _4=1.0, _5=-np.inf),
        ),
    ],
)
def test_penalties_bias_and_min_tokens(params: SamplingParams, row: list[float]) -> None:
    """Both for a row that resumes and for one that puts these ids out."""
    resumed = Penalties.of([start(params, [0, 0, 6], [1, 6, 1])], SIZE)
    assert applied(resumed)[0] == pytest.approx(row)
    running = Penalties.of([start(params, [0, 0, 6])], SIZE)
    for id in (1, 6, 1):
        running.count(mx.array([id]))
    assert applied(running)[0] == pytest.approx(row)


def test_output_penalties_spare_the_prompt() -> None:
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert applied(Penalties.of([start(params, [0, 1, 2, 2])], SIZE)) == [LOGITS]


KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(repetition_penalty=0.8, repetition_window=1),
    SamplingParams(repetition_penalty=1.2, repetition_window=3),
    SamplingParams(repetition_penalty=1.3, repetition_window=6, logit_bias={5: 1.0}),
    SamplingParams(frequency_penalty=0.3),
    SamplingParams(presence_penalty=0.7, min_tokens=4),
    SamplingParams(min_tokens=2, logit_bias={0: -1.0, 3: 2.0}),
    SamplingParams(repetition_penalty=1.1, presence_penalty=-0.2, frequency_penalty=0.1),
]


@pytest.mark.parametrize("seed", range(8))
def test_rows_join_and_leave_in_any_order(seed: int) -> None:
    """Each row has what is its own, whoever came before it, and whatever the others ask."""
    rng = np.random.default_rng(seed)
    rows: list[RowSampling] = []
    outputs: list[list[int]] = []
    batch = Penalties.of([], SIZE)
    for _ in range(12):
        joining = []
        for kind in rng.integers(len(KINDS), size=rng.integers(3)):
            ids = [int(id) for id in rng.integers(SIZE, size=9)]
            joining.append(start(KINDS[kind], ids[:5], ids[5 : 5 + rng.integers(4)]))
        batch.extend(Penalties.of(joining, SIZE))
        rows += joining
        outputs += [list(row.generated) for row in joining]
        if rng.random() < 0.5:
            keep = [int(index) for index in rng.permutation(len(rows))[: rng.integers(5)]]
            batch.filter(keep)
            rows, outputs = [rows[index] for index in keep], [outputs[index] for index in keep]
        if not rows:
            continue
        found = applied(batch, len(rows))
        for row, output, logits in zip(rows, outputs, found, strict=True):
            assert logits == pytest.approx(expected(row, output), rel=1e-5)
        ids = [int(id) for id in rng.integers(SIZE, size=len(rows))]
        batch.count(mx.array(ids))
        for output, id in zip(outputs, ids, strict=True):
            output.append(id)


def test_nothing_is_computed_without_need() -> None:
    logits = mx.array([LOGITS, LOGITS])
    needing = start(SamplingParams(repetition_penalty=1.1, presence_penalty=1.0))
    batch = Penalties.of([start(SamplingParams(logit_bias={99: 1.0})), needing], SIZE)
    assert batch.apply(logits) is not logits
    batch.filter([0])
    batch.count(mx.array([3]))
    only = logits[:1]
    assert batch.apply(only) is only


def test_the_logits_of_a_row_without_need_stay_as_they_are() -> None:
    logits = mx.random.normal((2, SIZE), key=mx.random.key(2)).astype(mx.bfloat16)
    every = SamplingParams(
        repetition_penalty=1.1, presence_penalty=0.1, logit_bias={1: 0.1}, min_tokens=9
    )
    batch = Penalties.of([start(SamplingParams()), start(every)], SIZE)
    batch.count(mx.array([2, 2]))
    changed = batch.apply(logits)
    assert mx.array_equal(changed[0], logits[0].astype(mx.float32))
    assert changed.dtype == mx.float32  # a small penalty is not rounded away


def test_ids_are_counted_before_they_are_known() -> None:
    """One step is in flight while the host reads the last one."""
    batch = Penalties.of([start(SamplingParams(frequency_penalty=1.0))], SIZE)
    ids = mx.argmax(batch.apply(mx.array([LOGITS])), axis=-1)
    for _ in range(3):
        batch.count(ids)
        ids = mx.argmax(batch.apply(mx.array([LOGITS])), axis=-1)
    row = start(SamplingParams(frequency_penalty=1.0))
    assert applied(batch)[0] == pytest.approx(expected(row, [0, 1, 0]))
