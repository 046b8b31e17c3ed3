"""The messages that cross between the asyncio side and the engine thread: plain Python values.

In: `Admit`, `Cancel`. Out: `Output`, one list per step. Nothing here holds an `mx.array`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

NO_BOUND = 2**62
"""Stands for no limit."""


class RowKey(NamedTuple):
    """Names one row: a late message about attempt 1 can never hit attempt 2 of the same job.

    A server that lost its data counts attempts anew. So a row's outputs carry the very key object
    that came with its request, and a late one of an earlier row of that name is not taken for it.
    """

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits; meanings and ranges as in `Job`.

    repetition_window  ids of prompt and output the repetition penalty looks back over; 0: all
    min_tokens         no id that ends the row before so many ids of output
    logprobs           top alternatives to report per id, 0: the drawn id alone; None: no report
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    repetition_window: int = 0
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Logprob(NamedTuple):
    """Natural logarithms of probabilities, after penalties and bias, before temperature and cuts.

    logprob  of the id that was drawn
    top      the most probable ids, best first, as many as the row asked for
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Admit:
    """A checked request: prompt ids, and the ids an earlier attempt generated already.

    max_tokens counts over all attempts: at most `max_tokens - len(generated)` more are made.
    Sampling continues at position len(generated).

    priority    0 high, 1 normal, 2 low: rows wait, and are parked, by it
    cache_salt  rows of different salts share no prompt prefix
    """

    key: RowKey
    prompt: list[int]
    generated: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    priority: int = 1
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the row, in whatever stage it is; unknown keys are ignored."""

    key: RowKey


class Output(NamedTuple):
    """New ids of one row in one step.

    finish "stop": the model ended with an id of `stop_ids`, which is not in `ids`.
    finish "length": max_tokens is reached; the last id is in `ids`.
    finish "error": this row alone failed; `error` says why.
    finish "preempted": the memory of this row was needed: it is to go on later, from all its ids.
    The row is gone in all four cases.

    logprobs  one per id of `ids`, if the row asked
    cached    set once, when the row's prefill begins (`ids` may be empty): how many of the ids of
              its prompt and earlier output the prefix cache spared it to read
    """

    key: RowKey
    ids: list[int]
    finish: Literal["stop", "length", "error", "preempted"] | None = None
    error: str = ""
    logprobs: list[Logprob] | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the asyncio side must know of the loaded model.

    fingerprint     same for two workers with the same weights and tokenizer: see fingerprint.py
    context_length  most positions (prompt + output) of one row

    What all rows hold together stays within kv_budget_bytes; a row of n positions holds
    `kv_row_bytes + n * kv_bytes_per_token`, the fixed part being state that does not grow.

    max_batch       most rows with a slot: 1 if the model was found inexact beside others
    """

    name: str
    path: str
    fingerprint: str
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    kv_bytes_per_token: int = 0
    kv_row_bytes: int = 0
    kv_budget_bytes: int = NO_BOUND
    max_batch: int = NO_BOUND
