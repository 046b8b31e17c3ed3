"""What really happened on the server: every script that ran, answered or not, is entered here.

The schedule sees all replies, also those an actor never gets. So each call can be judged at once
against what was promised before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxq.protocol.keys import LANES, Lane
from mlxq.protocol.scripts import DONE, REPEATED, Call, Enqueued, Take, Taken
from tests.model.handout import RELEASED, ROUNDING_S, HandOut, tally
from tests.model.plan import Plan


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Entry:
    """What is known of one job."""

    plan: Plan
    enqueued: bool = False
    confirmed: bool = False  # the submitter has seen the answer
    deadline: float = 0.0  # latest time the deadline can be, seconds of this host's clock
    handouts: dict[int, HandOut] = field(default_factory=dict)
    attempt: int = 0
    doomed: int | None = None  # events stored when an abort key was set on the live job
    aborted: bool = False  # ABORT said: closed now
    sweeps: int = 0  # rounds of SWEEP since it was due to be closed
    tampered: bool = False  # an operator wrote into its transcript
    finish: tuple[int, str, Sequence[bytes], bytes] | None = None  # seq, state, events, result

    @property
    def current(self) -> HandOut | None:
        return self.handouts.get(self.attempt)

    @property
    def due(self) -> bool:
        """Whether an abort key or a passed deadline asks for its end."""
        expired = 0 < self.deadline < time.time() - ROUNDING_S
        return self.enqueued and (self.doomed is not None or expired)

    @property
    def current_owner(self) -> str:
        return self.current.owner if self.current else ""

    def owned(self, owner: str, attempt: int) -> bool:
        now = self.current
        return bool(now and attempt == self.attempt and now.owner == owner and not now.end)


class Server(Protocol):
    """What the ledger asks the server itself."""

    def waiting(self, ids: list[str]) -> tuple[list[str], list[str]]:
        """Those of these jobs that lack nothing but a slot, and those that need an empty worker."""
        ...

    def among(self, ids: list[str], *states: bytes) -> list[str]:
        """Those of these jobs that are in one of the states."""
        ...


class Ledger:
    """Truth of one schedule. `saw` is called once for each script that ran."""

    def __init__(self, plans: Sequence[Plan], server: Server) -> None:
        self.jobs = {plan.id: Entry(plan) for plan in plans}
        self.server = server
        self.bell = (0, 0)  # as the last TAKE saw it
        self.rung = False  # since then
        self.room_until = 0.0  # somebody makes room for a suspect, monotonic seconds
        self.swept = 0  # entries looked at since SWEEP last came round

    def saw(self, name: str, call: Call[Any], reply: Any, before: float) -> None:
        """Enters one run. `before`: monotonic seconds before the call was sent."""
        args = call.args[1:]  # without the publish command
        getattr(self, f"_{name}")(args, reply, before)

    def _enqueue(self, args: Any, reply: Enqueued, before: float) -> None:
        job = self.jobs[args[0]]
        if reply.status == "ok":
            _check(not job.enqueued, f"{args[0]} was created twice")
            job.enqueued = self.rung = True
            job.deadline = time.time() + args[3] / 1000 if args[3] else 0.0

    def _take(self, args: Any, reply: Take, before: float) -> None:
        owner, n, lease_ms, alone, recover, _, lanes = args
        asked = LANES[:lanes]
        _check(len(reply.jobs) <= n, f"TAKE gave {len(reply.jobs)} jobs for {n} slots")
        solo = [taken for taken in reply.jobs if taken.solo]
        _check(not solo or (alone and len(reply.jobs) == 1), "a suspect was not handed out alone")
        self._check_bell(reply.bell_id)
        for job in self.jobs.values():
            if job.current and (recover or job.plan.lane in asked):
                job.current.seen_by(owner, bool(recover))
        for taken in reply.jobs:
            self._hand_out(taken, owner, lease_ms, before)
            lane = self.jobs[taken.id].plan.lane
            _check(lane in asked or recover, f"{taken.id} of lane {lane} came, of {asked} asked")
            _check(taken.lane in (lane, "high"), f"{taken.id} of lane {lane} came as {taken.lane}")
        if len(reply.jobs) < n and not reply.more and not solo:
            if recover:
                self._check_recovered(owner, {taken.id for taken in reply.jobs})
            self._check_nobody_waits(reply, asked, bool(alone and not recover), before)
        if reply.make_room:
            self.room_until = time.monotonic() + 2 * lease_ms / 1000

    def _check_bell(self, bell_id: str) -> None:
        """A worker that waits for a bell behind this id misses no job and wakes for no other."""
        ms, _, number = bell_id.partition("-")
        bell = (int(ms), int(number))
        _check((bell > self.bell) == self.rung, f"the bell is at {bell} after {self.bell}")
        self.bell, self.rung = bell, False

    def _hand_out(self, taken: Taken, owner: str, lease_ms: int, before: float) -> None:
        _check(taken.id in self.jobs, f"the stray entry {taken.id} was handed out")
        job, last = self.jobs[taken.id], self.jobs[taken.id].current
        what = f"{taken.id} attempt {taken.attempt}"
        _check(taken.attempt > job.attempt, f"{what} is not above attempt {job.attempt}")
        _check(job.finish is None and not job.aborted, f"{what} was handed out after its end")
        _check(job.doomed is None, f"{what} was handed out over an abort key")
        self._check_deadline(job, before, what)
        _check(taken.spec == job.plan.spec, f"{what} has another spec")
        if last:
            _check(last.may_go_to(), f"{what} was taken within the lease of {last}")
            last.followed_by(owner)
            self._check_suspect(job, taken, what)
        job.attempt = taken.attempt
        job.handouts[taken.attempt] = HandOut(owner, lease_ms / 1000, before)

    def _check_suspect(self, job: Entry, taken: Taken, what: str) -> None:
        """A job under suspicion comes alone, one beyond hope not at all, any other is free."""
        crashes, strikes, _ = tally(job.handouts.values())
        _check(crashes[0] < 3 or strikes[0] < 2, f"{what} should have been given up")
        _check(taken.solo or strikes[0] == 0, f"{what} is a suspect, but not alone")
        _check(not taken.solo or strikes[1] > 0, f"{what} is no suspect, but alone")

    def _check_nobody_waits(
        self, reply: Take, asked: Sequence[Lane], alone: bool, before: float
    ) -> None:
        """A slot stayed free: what needs nothing but a slot has one, suspects soon will."""
        waiting = [
            job.plan.id
            for job in self.jobs.values()
            if job.enqueued and (job.current is None or job.current.end in RELEASED)
            if job.plan.lane in asked
        ]
        left, suspects = self.server.waiting(waiting)
        _check(not left, f"{left} waits while a slot is free")
        # Without its pending entry a suspect is met in the lane's order, behind who came earlier.
        first = [job_id for job_id in suspects if not self._is_regrouped(job_id)]
        _check(not (first and alone), f"an empty worker left the suspects {first}")
        room = reply.make_room or before < self.room_until
        _check(room or not suspects, f"nobody makes room for the suspects {suspects}")

    def _is_regrouped(self, job_id: str) -> bool:
        current = self.jobs[job_id].current
        return current is not None and current.regrouped

    def _check_recovered(self, owner: str, given: set[str]) -> None:
        """What an unanswered TAKE had given to this owner is known to it now, or not its own."""
        unheard = [
            job.plan.id
            for job in self.jobs.values()
            if job.current and job.current.owner == owner and not job.current.begun
        ]
        left = self.server.among([i for i in unheard if i not in given], b"running")
        _check(not left, f"{left} is still given to {owner}, which never heard of it")

    def _emit(self, args: Any, reply: list[int], before: float) -> None:
        owner, *rest = args
        for status, item in zip(reply, _groups(rest, 5), strict=True):
            job_id, attempt, seq, tokens, _ = item
            job = self.jobs[job_id]
            if status != DONE:
                continue
            what = f"event {attempt}-{seq} of {job_id} by {owner}"
            self._check_accepted(job, owner, attempt, before, what)
            now = job.handouts[attempt]
            now.begun = True
            if seq:
                now.stored = max(now.stored, tokens - job_tokens(job, attempt))

    def _finish(self, args: Any, reply: int, before: float) -> None:
        owner, job_id, attempt, seq, _, state, result, *events = args
        job = self.jobs[job_id]
        if reply == DONE:
            _check(job.owned(owner, attempt), f"{job_id} was finished by the zombie {owner}")
            job.handouts[attempt].begun = True
            job.handouts[attempt].end = "finish"
            job.finish = (seq, state, events, result)
        again = job.finish is not None and (owner, attempt) == (job.current_owner, job.attempt)
        _check(not again or reply in (DONE, REPEATED), f"who finished {job_id} was told {reply}")

    def _beat(self, args: Any, reply: list[int], before: float) -> None:
        owner, *rest = args
        for status, (job_id, attempt) in zip(reply, _groups(rest, 2), strict=True):
            job = self.jobs[job_id]
            if status == DONE:
                what = f"beat of {job_id} attempt {attempt} by {owner}"
                self._check_accepted(job, owner, attempt, before, what)
                job.handouts[attempt].begun = True
                job.handouts[attempt].renewed = before

    def _release(self, args: Any, reply: list[int], before: float) -> None:
        owner, reason, *rest = args
        for status, (job_id, attempt) in zip(reply, _groups(rest, 2), strict=True):
            job = self.jobs[job_id]
            if status == DONE:
                what = f"release of {job_id} attempt {attempt} by {owner}"
                self._check_accepted(job, owner, attempt, before, what)
                job.handouts[attempt].end = reason
                self.rung |= reason != "no_room"

    def _abort(self, args: Any, reply: str, before: float) -> None:
        job = self.jobs[args[0]]
        if reply == "aborted":
            _check(job.enqueued and job.finish is None, f"ABORT closed {args[0]} a second time")
            job.aborted = True
        elif reply == "unknown":
            _check(not job.enqueued, f"ABORT does not know {args[0]}")
            job.doomed = 0

    def _sweep(self, args: Any, reply: Any, before: float) -> None:
        _check(reply.looked <= args[0], f"SWEEP looked at {reply.looked} of {args[0]}")
        self.swept = 0 if reply.wrapped else self.swept + reply.looked
        _check(self.swept < 10 * len(self.jobs), "SWEEP never comes round")
        if reply.wrapped:
            due = [job for job in self.jobs.values() if job.due]
            for job in due:
                job.sweeps += 1
            # Before the first wrap the cursor may have been past it; the second round sees it.
            overdue = [job.plan.id for job in due if job.sweeps == 2]
            left = self.server.among(overdue, b"queued", b"running")
            _check(not left, f"{left} is still live after two rounds of SWEEP")

    def _check_accepted(
        self, job: Entry, owner: str, attempt: int, before: float, what: str
    ) -> None:
        _check(job.owned(owner, attempt), f"{what} was accepted from a zombie")
        _check(job.doomed is None, f"{what} was accepted over an abort key")
        self._check_deadline(job, before, what)

    def _check_deadline(self, job: Entry, before: float, what: str) -> None:
        if job.deadline:
            sent = time.time() - (time.monotonic() - before)
            _check(sent < job.deadline + ROUNDING_S, f"{what} came after its deadline")


def job_tokens(job: Entry, attempt: int) -> int:
    """Token ids stored by the attempts before this one."""
    return sum(past.stored for number, past in job.handouts.items() if number < attempt)


def _groups(flat: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def _check(promise: bool, broken: str) -> None:
    if not promise:
        raise Violation(broken)
