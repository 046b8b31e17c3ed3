"""One row per job this worker holds: what is stored of it, and what is still to be published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlxq.protocol.errors import FailureCode
from mlxq.protocol.events import (
    Done,
    Failed,
    FinishReason,
    Result,
    Resumed,
    Started,
    Timings,
    Token,
    TokenLogprob,
    Usage,
    encode_event,
    encode_result,
)
from mlxq.protocol.keys import LANES
from mlxq.protocol.scripts import LOOK_SEQ, Call, EmitItem, Scripts, Taken, look
from mlxq.worker.clock import now_s
from mlxq.worker.engine.request import RowKey
from mlxq.worker.output import OutputStage

# From here on an event holds at least so many ids: long transcripts cost a third of the memory.
LONG_TRANSCRIPT_EVENTS = 4096
LONG_TRANSCRIPT_IDS = 4


@dataclass(frozen=True, slots=True)
class Ending:
    """How a row ends: the state of its job, the terminal event and the result (may be empty)."""

    state: Literal["done", "failed"]
    terminal: bytes
    result: bytes


class Row:
    """One job in this worker. Loop thread only.

    Invariant: `seq` and `tokens` are what the server has confirmed. An event in `frozen` may
    have been stored already, so its bytes never change; what comes later waits in the buffer.
    """

    __slots__ = (
        "key", "solo", "priority", "seq", "tokens", "base", "stage", "prompt_tokens", "kv_bytes",
        "frozen", "ending", "finish_call", "_opening", "_cached", "_head", "_texts", "_ids",
        "_logprobs", "_all_logprobs", "_skip", "_resumed", "_admitted_s", "_first_token_s",
    )  # fmt: skip

    def __init__(self, taken: Taken) -> None:
        self.key = RowKey(taken.id, taken.attempt)
        self.solo = taken.solo
        self.priority = LANES.index(taken.lane)
        self.seq = taken.seq
        self.tokens = taken.tokens
        self.base = taken.tokens
        self._resumed = taken.seq > 0
        self.stage: OutputStage | None = None
        self.prompt_tokens = 0
        self.kv_bytes: int | None = None
        self.frozen: list[EmitItem] = []
        self.ending: Ending | None = None
        self.finish_call: Call[int] | None = None
        self._opening: Started | Resumed | None = None
        self._cached = 0
        self._head: bytes | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._all_logprobs: list[TokenLogprob] = []
        self._skip = 0
        self._admitted_s = now_s()
        self._first_token_s: float | None = None

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt has stored something."""
        return self._resumed

    @property
    def length(self) -> int:
        """Token ids of prompt and output so far."""
        return self.prompt_tokens + (len(self.stage.ids) if self.stage else 0)

    @property
    def decoding(self) -> bool:
        """Whether the row occupies a slot of the batch."""
        return self.ending is None

    @property
    def unproven(self) -> bool:
        """A suspect that has not stored a token in this attempt: nothing may join it."""
        return self.solo and self.ending is None and self.tokens == self.base

    def begin(
        self,
        opening: Started | Resumed,
        stage: OutputStage,
        prompt_tokens: int,
        *,
        skip: int = 0,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """The row is admitted; `opening` is to be its first event, see `open`. Drops the next
        `skip` characters, which an earlier attempt has published already, and knows the
        `logprobs` of that attempt."""
        self._opening, self.stage, self.prompt_tokens = opening, stage, prompt_tokens
        self._skip, self._all_logprobs = skip, list(logprobs)

    def open(self, cached_tokens: int = 0) -> bool:
        """The engine has begun with the row, and need not read so many of its ids: the first event
        is written, before any other. False if it was before."""
        if self._opening is None:
            return False
        self._cached = cached_tokens
        opening = msgspec.structs.replace(self._opening, cached_tokens=cached_tokens)
        self._head, self._opening = encode_event(opening), None
        return True

    def add(self, text: str, ids: list[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Buffers new ids, the text they released and, if asked for, their log probabilities."""
        if self._first_token_s is None:
            self._first_token_s = now_s()
        if self._skip and text:
            text, self._skip = text[self._skip :], max(0, self._skip - len(text))
        if text:
            self._texts.append(text)
        self._ids += ids
        if logprobs:
            self._logprobs += logprobs
            self._all_logprobs += logprobs

    def finish(self, reason: FinishReason) -> None:
        """The output is complete: what is buffered travels with the terminal event."""
        if self.ending is not None:
            return
        assert self.stage is not None
        self.open()
        usage, timings = self._usage(), self._timings()
        done = Done(finish_reason=reason, attempts=self.key.attempt, usage=usage, timings=timings)
        ids = self.stage.ids
        # After an attempt with another model the ids are others than it had reported on.
        logprobs = self._all_logprobs if len(self._all_logprobs) == len(ids) > 0 else None
        result = Result(self.stage.text, ids, reason, usage, timings, logprobs)
        self.ending = Ending("done", encode_event(done), encode_result(result))

    def fail(self, code: FailureCode, message: str, *, retryable: bool = False) -> None:
        """The job cannot go on: what is buffered is still published before the reason."""
        if self.ending is not None:
            return
        self.open()
        failed = Failed(
            code=code,
            message=message,
            retryable=retryable,
            attempts=self.key.attempt,
            usage=self._usage(),
        )
        self.ending = Ending("failed", encode_event(failed), b"")

    def outgoing(self) -> list[EmitItem]:
        """The items of the next EMIT: unanswered events again, else new ones, else a look.

        An ending row with nothing unanswered has none: FINISH carries the rest.
        """
        if not self.frozen and self.ending is None:
            self._freeze()
        if self.frozen or self.ending is not None:
            return self.frozen
        return [look(self.key.job_id, self.key.attempt)]

    def _freeze(self) -> None:
        few = self.seq >= LONG_TRANSCRIPT_EVENTS and len(self._ids) < LONG_TRANSCRIPT_IDS
        if self._head is None and (few or not self._ids):
            return
        tokens = self.tokens
        for event, ids in self._take_events():
            tokens += ids
            seq = self.seq + len(self.frozen) + 1
            self.frozen.append(EmitItem(*self.key, seq, tokens, event))

    def _take_events(self) -> list[tuple[bytes, int]]:
        """Empties head and buffer into events, each with its number of ids."""
        events = []
        if self._head is not None:
            events.append((self._head, 0))
            self._head = None
        if self._ids or self._texts:
            token = Token(text="".join(self._texts), ids=self._ids, logprobs=self._logprobs or None)
            events.append((encode_event(token), len(self._ids)))
            self._texts, self._ids, self._logprobs = [], [], []
        return events

    def stored(self, item: EmitItem) -> None:
        """The server has this item: the oldest frozen event, or a look."""
        if item.seq == LOOK_SEQ:
            return
        if self.frozen and self.frozen[0] is item:
            self.frozen.pop(0)
            self.seq, self.tokens = item.seq, item.tokens

    def finishing(self, owner: str, scripts: Scripts) -> Call[int] | None:
        """The FINISH call of an ending row: made once, then the same bytes for ever."""
        if self.ending is None or self.finish_call is not None:
            return self.finish_call
        last = self.frozen[-1] if self.frozen else None
        tokens = last.tokens if last else self.tokens
        events = self._take_events()
        self.finish_call = scripts.finish(
            owner,
            *self.key,
            seq=(last.seq if last else self.seq) + 1,
            tokens=tokens + sum(ids for _, ids in events),
            state=self.ending.state,
            result=self.ending.result,
            events=[event for event, _ in events] + [self.ending.terminal],
        )
        return self.finish_call

    def _usage(self) -> Usage:
        generated = len(self.stage.ids) if self.stage else self.tokens
        cached = min(self._cached, self.prompt_tokens)
        return Usage(self.prompt_tokens, generated, cached)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from admission to the first token of this attempt."""
        return self._first_token_s - self._admitted_s if self._first_token_s else None

    def _timings(self) -> Timings:
        total_s = now_s() - self._admitted_s
        first_s = self.first_token_s
        return Timings(
            first_token_s=round(total_s if first_s is None else first_s, 6),
            total_s=round(total_s, 6),
        )


class Rows:
    """All rows of this worker by (job id, attempt), at most one a job. Loop thread only.

    `on_change` runs when a row comes, ends or goes, with this table.
    """

    def __init__(self, on_change: Callable[[Rows], None] = lambda rows: None) -> None:
        self._rows: dict[RowKey, Row] = {}
        self._by_job: dict[str, Row] = {}
        self._decoding: set[RowKey] = set()
        self.on_change = on_change
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    def get(self, key: RowKey) -> Row | None:
        return self._rows.get(key)

    def of_job(self, job_id: str) -> Row | None:
        """The row of one job: an old attempt may still be here when a new one is handed out."""
        return self._by_job.get(job_id)

    def add(self, row: Row) -> None:
        """Takes in a row. An old one of its job must have been removed."""
        assert row.key.job_id not in self._by_job
        self._rows[row.key] = self._by_job[row.key.job_id] = row
        self._decoding.add(row.key)
        self.empty.clear()
        self.on_change(self)

    def ended(self, row: Row) -> None:
        """The row has its ending: it has left its slot, and waits for its FINISH."""
        self._decoding.discard(row.key)
        self.on_change(self)

    def remove(self, row: Row) -> bool:
        """Whether the row was still here."""
        if self._rows.get(row.key) is not row:
            return False
        del self._rows[row.key]
        del self._by_job[row.key.job_id]
        self._decoding.discard(row.key)
        if not self._rows:
            self.empty.set()
        self.on_change(self)
        return True

    @property
    def keys(self) -> tuple[RowKey, ...]:
        return tuple(self._rows)

    @property
    def occupied(self) -> int:
        """Slots of the batch in use."""
        return len(self._decoding)


def log_key(row: Row) -> dict[str, Any]:
    """The fields that every log line about a row has."""
    return {"job": row.key.job_id, "attempt": row.key.attempt}
