"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlxq.worker.engine.caches import Cache
from mlxq.worker.engine.request import Admit, RowKey
from mlxq.worker.engine.sampling import RowSampling


@dataclass(eq=False, slots=True)
class Row:
    """A row; whoever runs it at the moment owns it. Engine thread only.

    arrival  its number among all rows
    output   ids generated so far, those of earlier attempts and a stop id included
    cache    what it has read already, while nothing runs it; None: nothing
    held     how many of its ids that cache holds
    alone    it must not be prefilled beside others
    begun    its prefill has begun once
    stops    lengths at which its prefill pauses, for the prefix cache to keep a copy
    """

    request: Admit
    arrival: int = 0
    alone: bool = False
    begun: bool = False
    cache: Cache | None = None
    held: int = 0
    stops: list[int] = field(default_factory=list)
    output: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.output = list(self.request.generated)

    @property
    def key(self) -> RowKey:
        return self.request.key

    @property
    def rank(self) -> tuple[int, int]:
        """Rows come in this order, smallest first."""
        return self.request.priority, self.arrival

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return self.request.prompt + self.output

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """Its length if it makes all of its ids."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def left(self) -> int:
        """Ids it may still make."""
        return self.request.max_tokens - len(self.output)

    @property
    def sampling(self) -> RowSampling:
        """What its next ids are drawn by."""
        request = self.request
        return RowSampling(request.sampling, request.prompt, list(self.output), request.stop_ids)

    def take(self, id: int) -> Literal["stop", "length"] | None:
        """Adds a new id; whether, and why, the row ends with it."""
        self.output.append(id)
        if id in self.request.stop_ids:
            return "stop"
        return "length" if self.left <= 0 else None
