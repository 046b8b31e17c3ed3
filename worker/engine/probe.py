"""Two short rows that show whether the engine works."""

from __future__ import annotations

from typing import Any

from mlxq.worker.engine.decode import DecodeBatch
from mlxq.worker.engine.prefill import Prefill
from mlxq.worker.engine.request import Admit, RowKey, SamplingParams
from mlxq.worker.engine.row import Row
from mlxq.worker.engine.row_cache import CacheOptions

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

    The first takes every path of the sampler, so that a first job finds all of it compiled.
    """
    batch = DecodeBatch(network, options)
    for length, sampling in list(enumerate((_EVERYTHING, _GREEDY), 2))[:max_batch]:
        request = Admit(RowKey("probe", length), [0] * length, [], 3, sampling, frozenset())
        ready = Prefill(network, [Row(request)], options).read(length).ready
        assert ready is not None
        batch.join(ready)
    while batch.rows:
        batch.step()
