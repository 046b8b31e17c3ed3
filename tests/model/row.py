"""One job in a worker's batch: what is generated, what is under way, what is stored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlxq.protocol.events import Done, Event, Failed, Result, Token, encode_event, encode_result
from mlxq.protocol.scripts import Call, EmitItem, Scripts, Taken
from tests.model.plan import Plan, emitted, text_of


@dataclass
class Row:
    """The row of one attempt. seq and ids below `sent` are stored or in a frozen event."""

    taken: Taken
    plan: Plan
    received: bool = False  # the server has our receipt
    admitted: bool = False
    solo: bool = False  # a suspect that has not stored a token yet
    seq: int = 0
    ids: list[int] = field(default_factory=list)  # of all attempts
    sent: int = 0
    opening: Event | None = None  # `started` or `resumed`, not frozen yet
    frozen: list[EmitItem] = field(default_factory=list)
    finish: Call[int] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.taken.id, self.taken.attempt

    @property
    def complete(self) -> bool:
        return len(self.ids) >= self.plan.length

    @property
    def fresh_tokens(self) -> bool:
        """Whether this attempt has stored a token."""
        return self.sent > self.taken.tokens and not self.frozen

    def admit(self, opening: Event, ids: list[int]) -> None:
        self.admitted, self.opening = True, opening
        self.seq, self.sent, self.ids = self.taken.seq, len(ids), list(ids)

    def decode(self, count: int) -> None:
        """One engine step: up to `count` more tokens."""
        self.ids = self.plan.ids(min(self.plan.length, len(self.ids) + count))

    def freeze(self) -> list[EmitItem]:
        """The events to send now, the same until they are answered; empty: nothing to say."""
        if self.frozen or self.finish or not self.admitted:
            return self.frozen
        if self.opening is not None:
            self._freeze(self.opening, self.sent)
            self.opening = None
        # The token that ends the job travels in FINISH, so that a live job is never complete.
        ready = min(len(self.ids), self.plan.length - 1)
        if ready > self.sent:
            self._freeze(self._token(ready), ready)
        return self.frozen

    def _freeze(self, event: Event, tokens: int) -> None:
        number = self.seq + len(self.frozen) + 1
        self.frozen.append(EmitItem(*self.key, number, tokens, encode_event(event)))
        self.sent = tokens

    def _token(self, end: int) -> Token:
        new, old = emitted(self.ids[:end]), emitted(self.ids[: self.sent])
        return Token(text=new[len(old) :], ids=self.ids[self.sent : end])

    def thaw(self, seq: int) -> None:
        """The event `seq` is stored."""
        self.frozen = [item for item in self.frozen if item.seq > seq]
        self.seq = max(self.seq, seq)
        if self.fresh_tokens:
            self.solo = False

    def end(self, scripts: Scripts, owner: str, rng: random.Random) -> None:
        """Freezes the natural end: the rest of the tokens and `done` in one FINISH."""
        events: list[Event] = []
        if self.opening is not None:
            events.append(self.opening)
            self.opening = None
        first = len(self.frozen) + self.seq + 1
        if len(self.ids) - self.sent > 1 and rng.random() < 0.5:
            events.append(self._token(len(self.ids) - 1))
            self.sent = len(self.ids) - 1
        rest = text_of(self.ids)[len(emitted(self.ids[: self.sent])) :]
        events.append(Token(text=rest, ids=self.ids[self.sent :]))
        events.append(Done(finish_reason="length", attempts=self.taken.attempt))
        result = Result(text_of(self.ids), self.ids, "length")
        self._end(scripts, owner, "done", first, encode_result(result), events)

    def fail(self, scripts: Scripts, owner: str, code: str, message: str) -> None:
        """Freezes a failed end. The row was never admitted."""
        event = Failed(code=code, message=message, attempts=self.taken.attempt)
        self.sent = self.taken.tokens
        self._end(scripts, owner, "failed", self.taken.seq + 1, b"", [event])

    def _end(
        self,
        scripts: Scripts,
        owner: str,
        state: Literal["done", "failed"],
        seq: int,
        result: bytes,
        events: Sequence[Event],
    ) -> None:
        self.finish = scripts.finish(
            owner,
            *self.key,
            seq=seq,
            tokens=len(self.ids) if state == "done" else self.taken.tokens,
            state=state,
            result=result,
            events=[encode_event(event) for event in events],
        )
