"""A batch without a model: known answers, one id per row and step, steps on command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxq.worker.engine.request import Admit, Logprob, ModelInfo, Output, RowKey


@dataclass
class FakeRow:
    request: Admit
    answer: Sequence[int]
    position: int
    begun: bool = False


@dataclass
class FakeBatch:
    """Gives every request the ids of `answer(request)`, then the end of sequence.

    Free running with `step_s` between steps, or, with `manual`, one step per `allow`. `cached` is
    what it says of the prefix cache when it begins with a row: at once, allowed or not.
    `before_step` may raise or hang: whatever a test wants of a broken engine.
    """

    info: ModelInfo
    answer: Callable[[Admit], Sequence[int]]
    step_s: float = 0.002
    manual: bool = False
    before_step: Callable[[list[Admit]], None] = lambda rows: None
    cached: int = 0
    logprobs: Callable[[int], Logprob] | None = None
    rows: dict[RowKey, FakeRow] = field(default_factory=dict)
    admitted: list[Admit] = field(default_factory=list)
    steps_of: dict[RowKey, int] = field(default_factory=dict)
    together: set[int] = field(default_factory=set)  # how many rows a step has had
    closed: bool = False
    _allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def allow(self, steps: int = 1) -> None:
        self._allowed.release(steps)

    @property
    def kv_bytes(self) -> int:
        return 1000 * len(self.rows)

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    def admit(self, request: Admit) -> None:
        self.admitted.append(request)
        self.rows[request.key] = FakeRow(request, self.answer(request), len(request.generated))

    def cancel(self, key: RowKey) -> None:
        self.rows.pop(key, None)

    def step(self) -> list[Output]:
        begun = [self._begin(key, row) for key, row in self.rows.items() if not row.begun]
        if self.manual:
            if not self._allowed.acquire(timeout=0.0 if begun else 0.02):
                return begun
        else:
            time.sleep(self.step_s)
        self.together.add(len(self.rows))
        self.before_step([row.request for row in self.rows.values()])
        return begun + [self._advance(key, row) for key, row in list(self.rows.items())]

    def _begin(self, key: RowKey, row: FakeRow) -> Output:
        row.begun = True
        return Output(key, [], cached=self.cached)

    def _advance(self, key: RowKey, row: FakeRow) -> Output:
        self.steps_of[key] = self.steps_of.get(key, 0) + 1
        if row.position >= len(row.answer):
            del self.rows[key]
            return Output(key, [], "stop")
        token = row.answer[row.position]
        row.position += 1
        logprobs = None
        if self.logprobs is not None and row.request.sampling.logprobs is not None:
            logprobs = [self.logprobs(token)]
        if row.position >= row.request.max_tokens:
            del self.rows[key]
            return Output(key, [token], "length", logprobs=logprobs)
        return Output(key, [token], logprobs=logprobs)

    def close(self) -> None:
        self.closed = True
