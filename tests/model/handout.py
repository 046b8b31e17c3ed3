"""One attempt of a job as seen from outside, and what it counts for (PROTOCOL section 8)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

ROUNDING_S = 0.003  # the server counts idle time in whole milliseconds
RELEASED = frozenset({"drain", "preempt", "no_room", "crash"})

# charged: a crash. requeued: given back or taken back, no crash. kept: it ended the job.
# doubtful: nobody outside can tell whose TAKE found the lapsed lease.
Fate = Literal["charged", "requeued", "kept", "doubtful"]


@dataclass
class HandOut:
    """One attempt, from TAKE to whatever ended it."""

    owner: str
    lease_s: float
    renewed: float  # before the last call that renewed the lease was sent; monotonic seconds
    begun: bool = False  # the owner has spoken
    stored: int = 0  # token ids stored by this attempt
    end: str = ""  # reason of RELEASE, or "finish"
    regrouped: bool = False  # the group was lost: the entry is handed out again at once
    own_take: bool = False  # its owner may have taken it back: lapsed, or never heard of
    other_take: bool = False  # somebody else may have found it lapsed
    fate: Fate = "doubtful"

    @property
    def lapsed(self) -> bool:
        return time.monotonic() - self.renewed > self.lease_s - ROUNDING_S

    def seen_by(self, taker: str, recover: bool) -> None:
        """A TAKE ran, whatever it found."""
        if self.owner == taker:
            self.own_take |= self.lapsed or (recover and not self.begun)
        else:
            self.other_take |= self.lapsed

    def may_go_to(self) -> bool:
        """Whether the job may be handed out again now."""
        return bool(self.end) or self.regrouped or self.own_take or self.lapsed

    def followed_by(self, owner: str) -> None:
        """Another attempt was handed out: settles what this one counts for."""
        if self.end:
            self.fate = "charged" if self.end == "crash" else "requeued"
        elif not self.begun or (self.regrouped and not self.lapsed):
            self.fate = "requeued"
        elif self.owner == owner:
            self.fate = "doubtful" if self.other_take else "requeued"
        elif not self.own_take and not self.regrouped:
            self.fate = "charged"

    def last(self, lost: bool) -> None:
        """No attempt came after it. `lost`: the job was given up."""
        if self.end:
            fates: dict[str, Fate] = {"finish": "kept", "crash": "charged"}
            self.fate = fates.get(self.end, "requeued")
        elif not self.begun:
            self.fate = "kept"
        elif lost:
            self.fate = "charged"
        elif not self.own_take and not self.other_take and not self.regrouped:
            self.fate = "kept"


class Tally(NamedTuple):
    """Crashes and strikes of a job, each at least and at most."""

    crashes: tuple[int, int]
    strikes: tuple[int, int]
    unheard: int  # hand-outs without a word from their owners


def tally(handouts: Iterable[HandOut]) -> Tally:
    """Adds up attempts whose fate is settled."""
    crashes, strikes, unheard = (0, 0), (0, 0), 0
    for now in handouts:
        sure, maybe = now.fate == "charged", now.fate in ("charged", "doubtful")
        crashes = (crashes[0] + sure, crashes[1] + maybe)
        unheard += not now.begun
        if not now.stored:
            strikes = (strikes[0] + sure, strikes[1] + maybe)
        elif now.fate in ("charged", "requeued"):
            strikes = (0, 0)
        elif now.fate == "doubtful":
            strikes = (0, strikes[1])
    return Tally(crashes, strikes, unheard)
