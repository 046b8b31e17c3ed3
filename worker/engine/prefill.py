"""Rows on their way into the decode batch: their prompts are read chunk by chunk."""

from __future__ import annotations

from typing import Any

from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from mlxq.worker.engine.request import Admit
from mlxq.worker.engine.sampling import greedy, make_processors, make_sampler


class Prefill:
    """One row of any length, or a few that fit one step side by side. Engine thread only.

    Their KV cache is their own until `advance` hands them over, so what raises in here harms no
    other row.
    """

    def __init__(self, network: Any, requests: list[Admit], vocab_size: int) -> None:
        self.requests = requests
        self._network = network
        self._vocab_size = vocab_size
        self._rest = [request.prompt + request.generated for request in requests]
        self._batch: PromptProcessingBatch | None = None

    @property
    def kv_bytes(self) -> int:
        """Memory of the cache so far."""
        return sum(cache.nbytes for cache in self._batch.prompt_cache) if self._batch else 0

    def advance(self, step: int) -> GenerationBatch | None:
        """Reads at most `step` ids of each row.

        After the last ids the rows are returned, ready to decode, their next id on the way.
        """
        if self._batch is None:
            self._batch = self._start()
        if max(map(len, self._rest)) <= step:
            return self._batch.generate(self._rest)
        self._batch.prompt([ids[:step] for ids in self._rest])
        self._rest = [ids[step:] for ids in self._rest]
        return None

    def _start(self) -> PromptProcessingBatch:
        requests = self.requests
        return PromptProcessingBatch(
            self._network,
            uids=[request.key for request in requests],
            caches=[make_prompt_cache(self._network) for _ in requests],
            samplers=[make_sampler(r.sampling, len(r.generated)) for r in requests],
            fallback_sampler=greedy,
            logits_processors=[
                make_processors(r.sampling, len(r.prompt), self._vocab_size) for r in requests
            ],
            stop_sequences=[StopSequences([(id,) for id in r.stop_ids]) for r in requests],
            max_tokens=[r.max_tokens - len(r.generated) for r in requests],
        )


def padding_is_exact(network: Any) -> bool:
    """Whether rows of different length may be prefilled side by side: see `Network`."""
    exact: bool = network.padding_is_exact
    return exact
