"""The batch on mlx-lm's prefill and decode batches: slots, turns, and rows that fail alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import structlog
from mlx_lm.generate import GenerationBatch

from mlxq.worker.engine.models import LoadedModel, ModelError, Source, load_model, one_line
from mlxq.worker.engine.prefill import Prefill, padding_is_exact
from mlxq.worker.engine.request import Admit, Output, RowKey, SamplingParams
from mlxq.worker.engine.sampling import greedy

CACHE_LIMIT_BYTES = 2 << 30
"""Freed buffers MLX may keep. Its own limit is all of the memory: nothing would ever go back."""

_PROBES = (
    SamplingParams(
        temperature=0.9,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 0.1},
    ),
    SamplingParams(temperature=0.0),
)

_log = structlog.get_logger()


def load_batch(source: Source | str, *, max_batch: int = 32, prefill_step: int = 512) -> MlxBatch:
    """Loads a model and warms it up, on the engine thread.

    Raises ModelError; the thread must then end. The wired limit stays at 0, the default of MLX:
    wired memory together with a churn of buffers has made macOS panic, which mlx-lm's
    BatchGenerator risks by setting it to 100 %.
    """
    mx.set_cache_limit(CACHE_LIMIT_BYTES)
    try:
        batch = MlxBatch(load_model(source), max_batch=max_batch, prefill_step=prefill_step)
        batch.warm_up()
    except BaseException:
        _end_streams()
        raise
    return batch


def _end_streams() -> None:
    """A thread that ends with MLX streams of its own can abort the process at exit."""
    mx.clear_cache()
    mx.clear_streams()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row without a slot. One that waits to go alone is prefilled beside no other."""

    request: Admit
    alone: bool

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.request.generated)


class MlxBatch:
    """A `Batch`: rows wait for one of `max_batch` slots, prefill, decode. Engine thread only.

    A row is in exactly one of `_waiting`, `_prefilling`, `_decoding`; the last two hold slots.
    Decode results are handed out before any prefill can raise. A row whose prefill raises is
    run again alone, and fails if it raises alone while a known good row does not.

    max_batch     rows with a slot
    prefill_step  prompt ids read per step: of one long row, or of short ones together
    """

    def __init__(self, loaded: LoadedModel, *, max_batch: int, prefill_step: int) -> None:
        self.info = loaded.info
        self._network: Any = loaded.network
        self._max_batch = max_batch
        self._prefill_step = prefill_step
        self._side_by_side = padding_is_exact(loaded.network)
        self._waiting: deque[_Waiting] = deque()
        self._prefilling: deque[Prefill] = deque()
        self._decoding = self._empty()
        self._ended: list[Output] = []
        self._long_had_turn = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._ended or len(self._decoding))

    @property
    def kv_bytes(self) -> int:
        prefilling = sum(prefill.kv_bytes for prefill in self._prefilling)
        decoding: int = sum(cache.nbytes for cache in self._decoding.prompt_cache)
        return prefilling + decoding

    def admit(self, request: Admit) -> None:
        if len(request.generated) >= request.max_tokens:
            self._ended.append(Output(request.key, [], "length"))
        elif reason := self._refusal(request):
            self._ended.append(Output(request.key, [], "error", reason))
        else:
            long = len(request.prompt) + len(request.generated) > self._prefill_step
            self._waiting.append(_Waiting(request, alone=long or not self._side_by_side))

    def cancel(self, key: RowKey) -> None:
        self._waiting = deque(row for row in self._waiting if row.request.key != key)
        self._prefilling = deque(
            prefill for prefill in self._prefilling if prefill.requests[0].key != key
        )
        self._ended = [output for output in self._ended if output.key != key]
        if key in self._decoding.uids:
            rows = enumerate(self._decoding.uids)
            self._decoding.filter([index for index, other in rows if other != key])

    def step(self) -> list[Output]:
        outputs = self._decode()
        self._prefill()
        outputs += self._ended
        self._ended = []
        return outputs

    def close(self) -> None:
        """Frees rows and model. The thread must not use MLX any more: its streams are gone."""
        self._network = None
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding = self._empty()
        _end_streams()

    def warm_up(self) -> None:
        """Runs the probe. Raises ModelError: this model cannot run in a batch at all."""
        try:
            self.probe()
        except Exception as error:
            reason = one_line(error)
            raise ModelError(f"{self.info.name} fails its first generation: {reason}") from error

    def probe(self) -> None:
        """Runs short rows of different length to their end, beside the batch; raises what they do.

        The first takes every path of the sampler, so that a first job finds all of it compiled.
        """
        rows = self._empty()
        for index, sampling in enumerate(_PROBES[: self._max_batch]):
            prompt = [0] * (index + 2)
            request = Admit(RowKey("probe", index), prompt, [], 3, sampling, frozenset())
            rows.extend(self._new_prefill([request]).advance(len(prompt)))
        while len(rows):
            rows.next()

    def _refusal(self, request: Admit) -> str:
        """Why a request cannot be run; empty if it can. Once it runs, it must not raise."""
        ids = request.prompt + request.generated
        if not request.prompt:
            return "the prompt is empty"
        if not 0 <= min(ids) <= max(ids) < self.info.vocab_size:
            return f"an id is outside the vocabulary of {self.info.vocab_size}"
        if len(request.prompt) + request.max_tokens > self.info.context_length:
            return f"prompt and output exceed the context of {self.info.context_length}"
        return ""

    def _decode(self) -> list[Output]:
        outputs = []
        for response in self._decoding.next():
            ids = [] if response.finish_reason == "stop" else [response.token]
            outputs.append(Output(response.uid, ids, response.finish_reason))
        return outputs

    def _prefill(self) -> None:
        prefill = self._next_prefill()
        if prefill is None:
            return
        try:
            rows = prefill.advance(self._prefill_step)
        except Exception as error:
            self._isolate(prefill.requests, error)
            return
        if rows is None:
            self._prefilling.append(prefill)
        else:
            self._decoding.extend(rows)

    def _next_prefill(self) -> Prefill | None:
        """New rows and long ones under way take turns, so that neither starve the others."""
        free = self._max_batch - len(self._decoding) - len(self._prefilling)
        can_start = free > 0 and bool(self._waiting)
        if self._prefilling and not (can_start and self._long_had_turn):
            self._long_had_turn = True
            return self._prefilling.popleft()
        if not can_start:
            return None
        self._long_had_turn = self._waiting[0].alone
        return self._new_prefill(self._take_waiting(free))

    def _take_waiting(self, free: int) -> list[Admit]:
        """The first waiting row, and those behind it that fit one step beside it."""
        first = self._waiting.popleft()
        taken, longest = [first.request], first.length
        while not first.alone and self._waiting and len(taken) < free:
            row = self._waiting[0]
            longest = max(longest, row.length)
            if row.alone or longest * (len(taken) + 1) > self._prefill_step:
                break
            taken.append(self._waiting.popleft().request)
        return taken

    def _isolate(self, requests: list[Admit], error: Exception) -> None:
        """Finds who is at fault for a prefill that raised: a row, or the engine.

        Rows that ran side by side start again one by one. A row that was alone is failed, unless
        the probe raises too: then the engine is broken, and must not fail one job after another.
        """
        if len(requests) > 1:
            self._waiting.extendleft(_Waiting(row, alone=True) for row in reversed(requests))
            return
        self.probe()
        key = requests[0].key
        _log.error("prefill_failed", job=key.job_id, attempt=key.attempt, exc_info=error)
        self._ended.append(Output(key, [], "error", f"{type(error).__name__}: {error}"))

    def _new_prefill(self, requests: list[Admit]) -> Prefill:
        return Prefill(self._network, requests, self.info.vocab_size)

    def _empty(self) -> GenerationBatch:
        return GenerationBatch.empty(self._network, greedy)
