"""Whether a model gives its rows the same beside others as each alone, found out at start."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import structlog

from mlxq.worker.engine.decode import DecodeBatch
from mlxq.worker.engine.models import LoadedModel, one_line
from mlxq.worker.engine.network import Network
from mlxq.worker.engine.prefill import Prefill
from mlxq.worker.engine.request import Admit, Logprob, RowKey, SamplingParams
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions

TOLERANCES = {mx.float32: 1e-3, mx.float16: 0.1, mx.bfloat16: 0.5}
QUANTISED_TOLERANCE = 0.1
"""By how much the log probabilities of a row's ids may differ in the mean: by type of the logits,
and for quantised caches at least. The kernels for one row and for many round differently; what a
wrong row differs by is of the order of 1.
"""

CHUNK = 8
LONGEST_WINDOW = 256
_SAMPLING = SamplingParams(temperature=0.0, logprobs=8)

_log = structlog.get_logger()


class _Drawn(NamedTuple):
    id: int
    logprob: Logprob


_Output = list[_Drawn]


def self_check(loaded: LoadedModel, options: CacheOptions) -> LoadedModel:
    """The model, with what was found: padding_is_exact of its network, max_batch of its info.

    Two rows of different length start together, one leaves, and a third that is read in chunks
    joins, longer than a sliding window if that is short. If a row differs from itself alone, rows
    are prefilled one by one; if that does not help, a batch has one row. Raises what a row alone
    raises.
    """
    network = loaded.network
    expected = {row.key: _alone(network, options, row) for row in _rows(network, options)}
    side_by_side = network.padding_is_exact and options.kv_bits is None
    reason = _difference(network, options, expected, side_by_side=side_by_side)
    if reason and side_by_side:
        network.padding_is_exact = False
        _log.warning("prefill_side_by_side_off", model=loaded.info.name, reason=reason)
        reason = _difference(network, options, expected, side_by_side=False)
    if not reason:
        return loaded
    _log.error("inexact_in_a_batch", model=loaded.info.name, reason=reason, max_batch=1)
    return replace(loaded, info=replace(loaded.info, max_batch=1))


def _rows(network: Network, options: CacheOptions) -> list[Row]:
    """Two short rows, then the long one."""
    windows = [window for window in (network.window, options.max_kv_size) if window is not None]
    wrapping = [window + CHUNK + 4 for window in windows if window <= LONGEST_WINDOW]
    long = max([2 * CHUNK + 4, *wrapping])
    rows = []
    for number, (length, count) in enumerate([(2, 2), (5, 4), (long, 2)]):
        prompt = [(7919 * number + 104_729 * index) % network.vocab_size for index in range(length)]
        key = RowKey("self-check", number)
        rows.append(Row(Admit(key, prompt, [], count, _SAMPLING, frozenset())))
    return rows


def _alone(network: Network, options: CacheOptions, row: Row) -> _Output:
    """The whole prompt at once, then id after id."""
    batch = DecodeBatch(network, options)
    _join(batch, Prefill(network, [row], options), chunk=row.length)
    return _run(batch)[row.key]


def _difference(
    network: Network, options: CacheOptions, expected: dict[RowKey, _Output], *, side_by_side: bool
) -> str:
    """What is wrong with the rows beside each other; empty if nothing is."""
    try:
        outputs = _together(network, options, side_by_side)
    except Exception as error:
        return f"{type(error).__name__}: {one_line(error)}"
    tolerance = TOLERANCES[network.dtype]
    if options.kv_bits is not None:
        tolerance = max(tolerance, QUANTISED_TOLERANCE)
    found = [_compared(expected[key], output, tolerance) for key, output in outputs.items()]
    return "; ".join(filter(None, found))


def _together(network: Network, options: CacheOptions, side_by_side: bool) -> dict[RowKey, _Output]:
    first, second, late = _rows(network, options)
    batch = DecodeBatch(network, options)
    for rows in [[first, second]] if side_by_side else [[first], [second]]:
        _join(batch, Prefill(network, rows, options), chunk=CHUNK)
    outputs = _run(batch, steps=2)
    _join(batch, Prefill(network, [late], options), chunk=CHUNK)
    for key, output in _run(batch).items():
        outputs.setdefault(key, []).extend(output)
    return outputs


def _join(batch: DecodeBatch, prefill: Prefill, *, chunk: int) -> None:
    ready = None
    while ready is None:
        ready = prefill.read(chunk).ready
    batch.join(ready)


def _run(batch: DecodeBatch, steps: int | None = None) -> dict[RowKey, _Output]:
    """Steps so often, or until no row is left; the new ids of every row."""
    outputs: dict[RowKey, _Output] = {}
    while batch.rows and steps != 0:
        for output in batch.step():
            drawn = map(_Drawn, output.ids, output.logprobs or [])
            outputs.setdefault(output.key, []).extend(drawn)
        steps = steps if steps is None else steps - 1
    return outputs


def _compared(expected: _Output, output: _Output, tolerance: float) -> str:
    """What is wrong with a row; empty if nothing is.

    The greedy ids may part where two are as good as equal; what follows cannot be compared.
    """
    differences = []
    for best, drawn in zip(expected, output, strict=True):
        if drawn.id != best.id:
            runner_up = dict(best.logprob.top).get(drawn.id)
            if runner_up is None or best.logprob.logprob - runner_up > tolerance:
                return f"id {drawn.id} where it is {best.id} alone"
            break
        differences.append(abs(drawn.logprob.logprob - best.logprob.logprob))
    mean = sum(differences) / max(1, len(differences))
    return "" if mean <= tolerance else f"log probabilities differ by {mean:.2g}"
