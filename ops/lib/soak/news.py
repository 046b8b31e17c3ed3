"""What happened: the last lines for whoever looks into a violation, and counts for the end."""

from __future__ import annotations

import time
from collections import Counter, deque


class Violation(Exception):
    """A promise was broken."""


class News:
    """Written by all parts of one event loop.

    lines       the latest happenings, with seconds since the round began
    counts      faults by kind, jobs, events and the like over all rounds
    remarks     what somebody should look at
    broken      promises that were broken; the round ends at the first
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=120)
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.broken: list[str] = []
        self.remarks: list[str] = []
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """A new round."""
        self._began_s = time.monotonic()
        self.lines.clear()

    def say(self, line: str) -> None:
        self.lines.append(f"{time.monotonic() - self._began_s:7.2f} {line}")

    def breach(self, what: str) -> None:
        """A promise is broken, as seen by a part that cannot raise."""
        self.say(f"BROKEN {what}")
        self.broken.append(what)

    def remark(self, what: list[str]) -> None:
        """Something allowed but rare, to be shown in the end with all that went before it."""
        if what:
            self.remarks += [*what, *(line[:120] for line in self.lines)]

    def check(self) -> None:
        """Raises Violation if something is broken."""
        if self.broken:
            raise Violation("\n".join(self.broken))
