"""What a draw costs, beside the largest logit alone: ms per step of a whole batch.

All kinds take turns, since a machine's speed drifts. Steps are queued as the engine queues them,
so on a GPU the host's part is hidden as long as the device is busy; the last column shows it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxq.worker.engine.request import SamplingParams
from mlxq.worker.engine.sampling import RowSampling, Sampling
from ops.lib.bench.measure import Report, Spread, columns, machine
from ops.lib.bench.options import at_least

HELP = "what a draw costs: temperature, cut-offs, penalties, logprobs"
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
LOGITS = 4
"""Arrays of logits that steps take in turn, so that none stays in a cache."""

WARM_STEPS = 2
TOP_P = (0.8, 0.9, 0.95)


class Kind(NamedTuple):
    """One way to draw: the parameters of the row-th of all rows."""

    label: str
    params: Callable[[int], dict[str, Any]]


KINDS = {  # what is not set is as in "temperature"
    "greedy": Kind("greedy rows", lambda row: {"temperature": 0.0}),
    "temperature": Kind("temperatures, seeds", lambda row: {}),
    "half": Kind("  half of the rows greedy", lambda row: {"temperature": row % 2 * 0.8}),
    "top_p": Kind("  top-p 0.8 to 0.95", lambda row: {"top_p": TOP_P[row % 3]}),
    "top_p_half": Kind("  top-p, half of the rows", lambda row: {"top_p": 1 - row % 2 * 0.1}),
    "top_p_low": Kind("  top-p 0.3", lambda row: {"top_p": 0.3}),
    "min_p": Kind("  min-p", lambda row: {"min_p": 0.05}),
    "top_k": Kind("  top-k 20 to 50", lambda row: {"top_k": 20 + row % 31}),
    "cuts": Kind("  top-k, top-p, min-p", lambda row: {"top_k": 50, "top_p": 0.9, "min_p": 0.05}),
    "penalties": Kind(
        "  presence, frequency", lambda row: {"presence_penalty": 0.2, "frequency_penalty": 0.2}
    ),
    "repetition": Kind(
        "  repetition, window 256",
        lambda row: {"repetition_penalty": 1.1, "repetition_window": 256},
    ),
    "bias": Kind(
        "  logit bias of 50 ids", lambda row: {"logit_bias": {id: 1.0 for id in range(50)}}
    ),
    "logprobs": Kind("  logprobs, 5 alternatives", lambda row: {"logprobs": 5}),
    "all": Kind(
        "all of these",
        lambda row: {
            **{"top_k": 50, "top_p": 0.9, "min_p": 0.05, "logprobs": 5},
            **{"presence_penalty": 0.2, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
        },
    ),
}


class Timing(NamedTuple):
    """Per step: `ms` until the last id is there, `host_ms` until it is on its way."""

    ms: float
    host_ms: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=at_least(1), default=32, metavar="N")
    parser.add_argument("--vocab", type=at_least(64), default=32_000, metavar="N")
    parser.add_argument("--steps", type=at_least(1), default=20, metavar="N", help="per round")
    parser.add_argument("--rounds", type=at_least(1), default=3, metavar="N")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the logits")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="default: all")


def measure(options: argparse.Namespace) -> Report:
    logits = some_logits(options.rows, options.vocab, DTYPES[options.dtype])
    kinds = {name: KINDS[name] for name in options.kind or KINDS}
    draws: dict[str, Callable[[mx.array], Sequence[mx.array]]] = {"argmax": largest}
    draws |= {name: drawer(kind, options.rows, options.vocab) for name, kind in kinds.items()}
    for draw in draws.values():
        timed(draw, logits, WARM_STEPS)
    rounds = [
        {name: timed(draw, logits, options.steps) for name, draw in draws.items()}
        for _ in range(options.rounds)
    ]
    about = {"rows": options.rows, "vocab": options.vocab, "dtype": options.dtype}
    labels = {"argmax": "argmax alone"} | {name: kind.label for name, kind in kinds.items()}
    return report(rounds, labels, {**about, "device": str(mx.default_device()), **machine()})


def some_logits(rows: int, vocab: int, dtype: mx.Dtype) -> list[mx.array]:
    """As peaked as those of a language model, roughly."""
    keys = mx.random.split(mx.random.key(0), LOGITS)
    logits = [(mx.random.normal((rows, vocab), key=key) * 3).astype(dtype) for key in keys]
    mx.eval(logits)
    return logits


def largest(logits: mx.array) -> list[mx.array]:
    return [mx.argmax(logits, axis=-1)]


def drawer(kind: Kind, rows: int, vocab: int) -> Callable[[mx.array], Sequence[mx.array]]:
    """Draws step after step for rows that have read and put out a few hundred ids."""
    context = [id % vocab for id in range(512)]
    params = [
        SamplingParams(**{"temperature": 0.5 + row % 10 / 10, "seed": row, **kind.params(row)})
        for row in range(rows)
    ]
    starts = [RowSampling(each, context, context[:256], frozenset()) for each in params]
    sampling = Sampling.of(starts, vocab)

    def draw(logits: mx.array) -> list[mx.array]:
        drawn = sampling.draw(logits)
        return [drawn.ids, *(drawn.logprobs.arrays if drawn.logprobs else [])]

    return draw


def timed(
    draw: Callable[[mx.array], Sequence[mx.array]], logits: list[mx.array], steps: int
) -> Timing:
    host_s = 0.0
    last: Sequence[mx.array] = ()
    started_s = time.perf_counter()
    for step in range(steps):
        began_s = time.perf_counter()
        drawn = draw(logits[step % LOGITS])
        host_s += time.perf_counter() - began_s
        mx.async_eval(*drawn)  # type: ignore[no-untyped-call]
        mx.eval(*last)  # one step in flight, as in the engine
        last = drawn
    mx.eval(*last)
    return Timing(*(1e3 * each / steps for each in (time.perf_counter() - started_s, host_s)))


def report(
    rounds: Sequence[dict[str, Timing]], labels: dict[str, str], about: dict[str, Any]
) -> Report:
    shown = columns(
        *("", "ms per draw", "above argmax", "host, ms"),
        title=f"{about['rows']} rows of {about['vocab']:,} logits: median (smallest..largest)",
    )
    numbers = {}
    for name, label in labels.items():
        taken = Spread.of([each[name].ms for each in rounds])
        above = Spread.of([each[name].ms - each["argmax"].ms for each in rounds])
        host = Spread.of([each[name].host_ms for each in rounds])
        numbers[name] = {"ms": taken, "above_argmax_ms": above, "host_ms": host}
        shown.add_row(label, str(taken), str(above), str(host))
    return Report(shown, {"benchmark": "sampling", "rounds": len(rounds), **numbers, **about})
