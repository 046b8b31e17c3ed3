"""The sampler of one row against plain numpy."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxq.worker.engine.request import SamplingParams
from mlxq.worker.engine.sampling import fold, greedy, make_processors, make_sampler

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0])
DRAWS = 1_000


def softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    shares: Vector = weights / weights.sum()
    return shares


def logprobs(logits: Vector = LOGITS) -> mx.array:
    return mx.array(np.log(softmax(logits))[None].astype(np.float32))


def frequencies(params: SamplingParams) -> Vector:
    sampler = make_sampler(params, 0)
    row = logprobs()
    ids = mx.concatenate([sampler(row) for _ in range(DRAWS)])
    return np.bincount(np.array(ids), minlength=len(LOGITS)) / DRAWS


def expected(temperature: float, kept: int = len(LOGITS)) -> Vector:
    """The distribution over the `kept` best ids; LOGITS fall, so they are the first."""
    scaled = LOGITS / temperature
    scaled[kept:] = -np.inf
    return softmax(scaled)


@pytest.mark.parametrize(
    ("params", "distribution"),
    [
        (SamplingParams(), expected(1.0)),
        (SamplingParams(temperature=0.5), expected(0.5)),
        (SamplingParams(temperature=3.0), expected(3.0)),
        (SamplingParams(top_k=3), expected(1.0, 3)),
        (SamplingParams(top_k=8), expected(1.0)),
        (SamplingParams(top_k=10**9), expected(1.0)),
        (SamplingParams(top_p=1e-9), expected(1.0, 1)),
        # 0.405 0.246 0.149 ...: the first two have 0.651, so 0.64 keeps two and 0.66 three.
        (SamplingParams(top_p=0.64), expected(1.0, 2)),
        (SamplingParams(top_p=0.66), expected(1.0, 3)),
        (SamplingParams(min_p=1.0), expected(1.0, 1)),
        # Ids within ln(10) of the best: 2.0 down to -0.30.
        (SamplingParams(min_p=0.1), expected(1.0, 5)),
        # At temperature 2 within 2 ln(10): 2.0 down to -2.6.
        (SamplingParams(min_p=0.1, temperature=2.0), expected(2.0, 7)),
        # Top-p counts what top-k left: of 0.506 0.307 0.186, two reach 0.8.
        (SamplingParams(top_k=3, top_p=0.8), expected(1.0, 2)),
    ],
)
def test_distribution(params: SamplingParams, distribution: Vector) -> None:
    found = frequencies(params)
    assert np.all(found[distribution == 0] == 0)
    assert np.abs(found - distribution).max() < 4 * math.sqrt(0.25 / DRAWS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3, seed=4),
        SamplingParams(temperature=2.0, top_k=1),
    ],
)
def test_greedy_rows_share_one_sampler(params: SamplingParams) -> None:
    assert make_sampler(params, 0) is greedy
    assert greedy(mx.array([[0.0, 3.0, 1.0], [4.0, 3.0, 1.0]])).tolist() == [1, 0]


def test_a_very_low_temperature_neither_overflows_nor_errs() -> None:
    sampler = make_sampler(SamplingParams(temperature=2e-5), 0)
    assert {sampler(logprobs()).item() for _ in range(20)} == {0}


def test_draw_depends_on_seed_and_position_alone() -> None:
    flat = mx.zeros((1, 100_000))
    for position in (0, 1, 17):
        sampler = make_sampler(SamplingParams(seed=3), 0)
        draws = [sampler(flat).item() for _ in range(position + 1)]
        assert make_sampler(SamplingParams(seed=3), position)(flat).item() == draws[-1]
    assert len(set(draws)) == len(draws)


def test_keys_of_near_seeds_and_positions_differ() -> None:
    seeds = (0, 1, 2, 2**32, 2**63 - 1)
    keys = {str(fold(seed, position).tolist()) for seed in seeds for position in range(50)}
    assert len(keys) == 5 * 50


def test_sampling_leaves_the_global_random_state_alone() -> None:
    def state() -> str:
        return str(mx.random.state)

    before = state()
    make_sampler(SamplingParams(seed=3), 0)(logprobs()).item()
    assert state() == before


def process(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    logits = mx.array(LOGITS[None].astype(np.float32))
    for processor in make_processors(params, len(prompt), len(LOGITS)):
        logits = processor(mx.array(prompt + output), logits)
    return [float(value) for value in np.array(logits[0])]


def changed(**values: float) -> list[float]:
    """LOGITS with some entries replaced: `changed(_3=0.1)`."""
    row = [float(value) for value in LOGITS]
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


@pytest.mark.parametrize(
    ("params", "expected_row"),
    [
        (SamplingParams(), changed()),
        # Divided where positive, multiplied where negative, once per id, prompt included.
        (SamplingParams(repetition_penalty=2.0), changed(_0=1.0, _1=0.75, _6=-2.0)),
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
    ],
)
def test_penalties_and_bias(params: SamplingParams, expected_row: list[float]) -> None:
    assert process(params, [0, 0, 6], [1, 6, 1]) == pytest.approx(expected_row)


def test_output_penalties_spare_the_prompt() -> None:
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert process(params, [0, 1, 2, 2], []) == LOGITS.tolist()


def test_no_processor_without_need() -> None:
    assert make_processors(SamplingParams(logit_bias={99: 1.0}), 3, 8) == ()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.3, frequency_penalty=0.3),
        SamplingParams(logit_bias={1: 0.3}),
    ],
)
def test_processors_keep_the_precision_of_the_model(params: SamplingParams) -> None:
    logits = mx.array(LOGITS[None]).astype(mx.bfloat16)
    (processor,) = make_processors(params, 1, len(LOGITS))
    assert processor(mx.array([0, 1, 2]), logits).dtype == mx.bfloat16
