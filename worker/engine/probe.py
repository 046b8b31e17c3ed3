"""Rows that nobody sent: whether the engine works, and how fast it reads."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import mlx.core as mx

from mlxq.worker.engine.decode import DecodeBatch
from mlxq.worker.engine.memory import readable_bytes
from mlxq.worker.engine.pace import Pace
from mlxq.worker.engine.prefill import Prefill
from mlxq.worker.engine.request import Admit, RowKey, SamplingParams
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions

STEPS = 9
LEARN_IDS, LEARN_CHUNKS, LEARN_S = 4096, 3, 1.0

_EVERYTHING = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 0.1},
)
_GREEDY = SamplingParams(temperature=0.0)


def probe(network: Any, options: CacheOptions, *, max_batch: int) -> None:
    """Runs rows of different length to their end, beside whatever else runs; raises what they do.

    The first takes every path of the sampler, so that a first job finds all of it compiled. The
    last, of a single id, decodes with nothing read before.
    """
    for lengths in ((2, 3)[:max_batch], (1,)):
        batch = DecodeBatch(network, options)
        for length, sampling in zip(lengths, (_EVERYTHING, _GREEDY), strict=False):
            request = Admit(RowKey("probe", length), [0] * length, [], 3, sampling, frozenset())
            _join(batch, Prefill(network, [Row(request)], options))
        while batch.rows:
            batch.step()


def pass_bytes(network: Any, options: CacheOptions) -> int:
    """What a GPU can read in the time of a decode step of a single short row.

    0 on a CPU, where attention is not bound by memory.
    """
    if mx.default_device() == mx.cpu:
        return 0
    batch, took_s = DecodeBatch(network, options), []
    request = Admit(RowKey("pass", 0), [0, 0], [], STEPS, _GREEDY, frozenset())
    _join(batch, Prefill(network, [Row(request)], options))
    while batch.rows:
        started_at = time.perf_counter()
        batch.step()
        took_s.append(time.perf_counter() - started_at)
    return readable_bytes(median(took_s))


def learn_pace(pace: Pace, network: Any, options: CacheOptions, context_length: int) -> None:
    """Reads a prompt until it is known what a chunk takes: a few chunks, and more for a second."""
    prompt = [0] * min(LEARN_IDS, context_length)
    request = Admit(RowKey("pace", 0), prompt, [], 1, _GREEDY, frozenset())
    prefill = Prefill(network, [Row(request)], options)
    begun_at, chunks, chunk = time.perf_counter(), 0, None
    while chunk is None or chunk.ready is None:
        if chunks >= LEARN_CHUNKS and time.perf_counter() - begun_at > LEARN_S:
            break
        started_at, chunks = time.perf_counter(), chunks + 1
        chunk = prefill.read(pace.ids(prefill.left, decoding=0))
        mx.eval(chunk.results)
        pace.chunk_alone(chunk.ids, time.perf_counter() - started_at)


def _join(batch: DecodeBatch, prefill: Prefill) -> None:
    ready = prefill.read(prefill.left).ready
    assert ready is not None
    batch.join(ready)
