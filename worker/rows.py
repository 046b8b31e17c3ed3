"""One row per job this worker holds: what is stored of it, and what is still to be published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mlxq.protocol.errors import FailureCode
from mlxq.protocol.events import (
    Done,
    Failed,
    FinishReason,
    Result,
    Timings,
    Token,
    Usage,
    encode_event,
    encode_result,
)
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
        "key", "solo", "seq", "tokens", "base", "stage", "prompt_tokens", "frozen", "ending",
        "finish_call", "_head", "_texts", "_ids", "_skip", "_resumed", "_admitted_s",
        "_first_token_s",
    )  # fmt: skip

    def __init__(self, taken: Taken) -> None:
        self.key = RowKey(taken.id, taken.attempt)
        self.solo = taken.solo
        self.seq = taken.seq
        self.tokens = taken.tokens
        self.base = taken.tokens
        self._resumed = taken.seq > 0
        self.stage: OutputStage | None = None
        self.prompt_tokens = 0
        self.frozen: list[EmitItem] = []
        self.ending: Ending | None = None
        self.finish_call: Call[int] | None = None
        self._head: bytes | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._skip = 0
        self._admitted_s = now_s()
        self._first_token_s: float | None = None

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt has stored something."""
        return self._resumed

    @property
    def decoding(self) -> bool:
        """Whether the row occupies a slot of the batch."""
        return self.ending is None

    @property
    def unproven(self) -> bool:
        """A suspect that has not stored a token in this attempt: nothing may join it."""
        return self.solo and self.ending is None and self.tokens == self.base

    def begin(self, head: bytes, stage: OutputStage, prompt_tokens: int, *, skip: int = 0) -> None:
        """The row is admitted; `head` is its first event. Drops the next `skip` characters,
        which an earlier attempt has published already."""
        self._head, self.stage, self.prompt_tokens, self._skip = head, stage, prompt_tokens, skip

    def add(self, text: str, ids: list[int]) -> None:
        """Buffers new ids and the text they released."""
        if self._first_token_s is None:
            self._first_token_s = now_s()
        if self._skip and text:
            text, self._skip = text[self._skip :], max(0, self._skip - len(text))
        if text:
            self._texts.append(text)
        self._ids += ids

    def finish(self, reason: FinishReason) -> None:
        """The output is complete: what is buffered travels with the terminal event."""
        if self.ending is not None:
            return
        assert self.stage is not None
        usage, timings = self._usage(), self._timings()
        done = Done(finish_reason=reason, attempts=self.key.attempt, usage=usage, timings=timings)
        result = Result(self.stage.text, self.stage.ids, reason, usage, timings)
        self.ending = Ending("done", encode_event(done), encode_result(result))

    def fail(self, code: FailureCode, message: str, *, retryable: bool = False) -> None:
        """The job cannot go on: what is buffered is still published before the reason."""
        if self.ending is not None:
            return
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
            token = Token(text="".join(self._texts), ids=self._ids)
            events.append((encode_event(token), len(self._ids)))
            self._texts, self._ids = [], []
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
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=generated)

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
