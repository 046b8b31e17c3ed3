"""What a job of a schedule does: its output is a function of its id, so anyone can check it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

from mlxq.protocol.jobs import Job, encode_job
from mlxq.protocol.keys import Lane

# good: ends naturally. bad: refused at admission. kill: its worker dies before the first token.
# engine: the engine dies before the first token, the process lives to say so.
# stubborn: kills its worker each time it has stored a token.
Kind = Literal["good", "bad", "kill", "engine", "stubborn"]
POISON: tuple[Kind, ...] = ("kill", "engine", "stubborn")


@dataclass(frozen=True)
class Plan:
    """One job: `length` tokens, the last of which travels in FINISH. Deadline 0: none."""

    id: str
    kind: Kind
    length: int
    lane: Lane
    deadline_ms: int

    @property
    def poison(self) -> bool:
        return self.kind in POISON

    @property
    def spec(self) -> bytes:
        return encode_job(Job(prompt=self.kind, max_tokens=self.length))

    def ids(self, count: int) -> list[int]:
        """The first `count` token ids of the job, whoever generates them."""
        return [zlib.crc32(f"{self.id}/{k}".encode()) % 50_000 for k in range(count)]


def text_of(ids: list[int]) -> str:
    """The whole text of these ids: one to three letters each."""
    return "".join("abcdefghij"[token % 10] * (1 + token % 3) for token in ids)


def emitted(ids: list[int]) -> str:
    """What a worker may show of a job that goes on: an `a` at the end is held back.

    As with stop strings, it depends on the ids alone, never on how they were grouped.
    """
    return text_of(ids).rstrip("a")
