"""A small honest worker (PROTOCOL section 7) whose engine makes known tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mlxq.protocol.keys import LANES
from mlxq.protocol.scripts import (
    DONE,
    GAP,
    REPEATED,
    Call,
    EmitItem,
    ReleaseReason,
    Take,
    look,
)
from tests.model.admission import admit
from tests.model.network import Lost
from tests.model.row import Row

if TYPE_CHECKING:
    from tests.model.world import World

SWEEP_CHUNK = 2


class Died(Exception):
    """The process is gone, with all it knew."""


class Worker:
    """One worker. A step does one thing that is due; Lost ends the step, what was frozen stays."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.slots = world.rng.randint(1, 3)
        self.lease_s = world.rng.randint(*world.mix.lease_ms) / 1000
        self.asleep_until = 0.0
        self.start()

    def start(self) -> None:
        """A new process: it has another owner name and knows nothing."""
        self.owner = self.world.new_owner(self.name)
        self.rows: dict[str, Row] = {}
        self.flight: tuple[Call[list[int]], list[EmitItem]] | None = None
        self.releases: list[Call[list[int]]] = []
        self.recover = self.draining = self.cramped = False
        self.room_since: float | None = None  # told to make room for a suspect
        self.bell_id = "0-0"
        now = time.monotonic()
        self.last_beat = self.last_answer = self.last_look = now
        self.next_take = self.next_sweep = self.no_take_until = now

    def step(self) -> bool:
        """Does one thing; False if nothing is due."""
        if time.monotonic() < self.asleep_until:
            return False
        duties = self._duties()
        if not duties:
            return False
        try:
            self.world.rng.choice(duties)()
        except Lost:
            pass
        except Died:
            self.crash()
        return True

    def crash(self) -> None:
        """kill -9 and, after a while, a restart."""
        self.world.net.note(self.owner, "dies with", [row.key for row in self.rows.values()])
        self.start()
        self.asleep_until = time.monotonic() + self.lease_s * self.world.rng.random()

    def pause(self) -> None:
        self.world.net.note(self.owner, "pauses")
        self.asleep_until = time.monotonic() + self.lease_s * self.world.rng.uniform(1.0, 2.5)

    # What is due

    def _duties(self) -> list[Callable[[], None]]:
        now, rows = time.monotonic(), self.rows.values()
        if rows and now - self.last_beat > self.lease_s / 4:
            self.world.watch(self, now)
            # The lease thread is never kept waiting by the rest for long.
            if self.world.rng.random() < 0.7:
                return [self._beat]
        duties: list[Callable[[], None]] = []
        if self.flight or any(not row.received for row in rows):
            duties.append(self._flush)
        elif any(row.freeze() for row in rows) or self._looks_due(now):
            duties += [self._flush] * 2
        duties += [partial(self._next, row) for row in rows if row.received]
        if self.releases:
            duties.append(self._send_release)
        elif self._must_leave(now):
            duties.append(self._leave)
        if now >= self.next_sweep:
            duties.append(self._sweep)
        if self._may_take(now):
            duties.append(self._take)
        return duties

    def _looks_due(self, now: float) -> bool:
        return bool(self.rows) and now - self.last_look > self.lease_s / 4

    def _may_take(self, now: float) -> bool:
        """Section 7.1, with every reason not to."""
        if now < max(self.next_take, self.no_take_until) or self.flight or self.draining:
            return False
        if len(self.rows) > self.slots:
            return False
        if len(self.rows) == self.slots and self.world.rng.random() < 0.8:
            return False  # else one of a higher lane, beyond the slots
        if any(row.solo or not row.received for row in self.rows.values()):
            return False
        if self.rows and (self.room_since is not None or self.cramped):
            return False
        return not self.rows or now - self.last_beat < self.lease_s / 2

    def _must_leave(self, now: float) -> bool:
        if self.flight:
            return False
        waited = self.room_since is not None and now - self.room_since > self.lease_s
        return self.draining or (waited and bool(self.rows))

    def bell_rang(self) -> bool:
        """What a blocking XREAD on the bell would have returned."""
        if time.monotonic() < self.asleep_until or len(self.rows) >= self.slots:
            return False
        bell = self.world.keys.bell
        rang = bool(self.world.client.xread({bell: self.bell_id}, count=1))
        if rang:
            self.next_take = min(self.next_take, time.monotonic())
        return rang

    # Calls

    def _call(self, call: Call[list[int]]) -> list[int]:
        reply = self.world.net.call(self.name, call)
        self._answered()
        return reply

    def _answered(self) -> None:
        """After a long silence: BEAT at once and no TAKE for a while (section 7.11)."""
        now = time.monotonic()
        if now - self.last_answer > self.lease_s / 2 and self.rows:
            self.last_beat = min(self.last_beat, now - self.lease_s)
            self.no_take_until = now + self.lease_s / 2
        self.last_answer = now

    def _take(self) -> None:
        n = self.slots - len(self.rows) or 1
        lanes = len(LANES) if len(self.rows) < self.slots else self.world.rng.choice((1, 2))
        alone = not self.rows and (self.room_since is not None or self.world.rng.random() < 0.3)
        call = self.world.scripts.take(
            self.owner,
            n,
            lease_ms=round(self.lease_s * 1000),
            alone=alone,
            recover=self.recover,
            max_crashes=self.world.max_crashes,
            lanes=lanes,
        )
        self.recover = True  # until this one is answered
        reply: Take = self.world.net.call(self.name, call)
        self.recover = False
        self._answered()
        now = time.monotonic()
        if lanes == len(LANES):  # else the bell may have rung for the others
            self.bell_id = reply.bell_id
        self.room_since = now if reply.make_room else None
        pause_s = self.lease_s / 4 * self.world.rng.uniform(0.5, 1)
        self.next_take = now if reply.more or reply.make_room else now + pause_s
        if reply.jobs and not self.rows:
            self.last_beat = now
        for taken in reply.jobs:
            self.rows[taken.id] = Row(taken, self.world.plan(taken.id), solo=taken.solo)

    def _beat(self) -> None:
        keys = [row.key for row in self.rows.values()]
        for key, status in zip(
            keys, self._call(self.world.scripts.beat(self.owner, keys)), strict=True
        ):
            if status != DONE:
                self._drop(key)
        self.last_beat = time.monotonic()

    def _flush(self) -> None:
        """One EMIT in flight; until it is answered it is repeated byte for byte."""
        if self.flight is None:
            items: list[EmitItem] = []
            new = [row for row in self.rows.values() if not row.received]
            for row in new or self.rows.values():
                items += row.freeze() or [look(*row.key)]
            self.flight = self.world.scripts.emit(self.owner, items), items
        call, items = self.flight
        statuses = self._call(call)
        self.flight = None
        self.last_look = time.monotonic()
        for item, status in zip(items, statuses, strict=True):
            self.world.check(status != GAP, f"a gap before {item}")
            flown = self._row((item.id, item.attempt))
            if flown is not None:
                self._landed(flown, item.seq, status)

    def _landed(self, row: Row, seq: int, status: int) -> None:
        if status not in (DONE, REPEATED):
            self._drop(row.key)
            return
        row.received = True
        if seq:
            row.thaw(seq)
            if row.plan.kind == "stubborn" and row.fresh_tokens:
                raise Died

    def _finish(self, row: Row, finish: Call[int]) -> None:
        # FINISH may overtake nothing: a gap says that the EMIT in flight did not arrive.
        if row.frozen and self.world.rng.random() < 0.5:
            return
        status = self.world.net.call(self.name, finish)
        self._answered()
        if status == GAP:
            self.world.check(bool(row.frozen), f"FINISH of {row.key} saw a gap")
        else:
            self._drop(row.key)

    def _sweep(self) -> None:
        self.next_sweep = time.monotonic() + self.lease_s / 2
        self.world.net.call(self.name, self.world.scripts.sweep(SWEEP_CHUNK))

    # The engine

    def _next(self, row: Row) -> None:
        if row.finish is not None:
            self._finish(row, row.finish)
        elif row.admitted:
            self._decode(row)
        else:
            self._admit(row)

    def _admit(self, row: Row) -> None:
        others = any(other.admitted for other in self.rows.values())
        if others and self.world.chance("no_room"):
            self.cramped = True
            self._give_back("no_room", [row])
        else:
            admit(self.world, self.name, self.owner, row)

    def _decode(self, row: Row) -> None:
        if not row.ids and row.plan.kind == "kill":
            raise Died
        if not row.ids and row.plan.kind == "engine":
            self.engine_dies()
            return
        row.decode(self.world.rng.randint(1, 3))
        if row.complete:
            row.end(self.world.scripts, self.owner, self.world.rng)

    # Giving jobs back

    def engine_dies(self) -> None:
        """All rows go back as crashed; the process ends once that is answered."""
        self.world.net.note(self.owner, "engine dies")
        self._give_back("crash", list(self.rows.values()))
        self.flight, self.draining = None, True

    def _leave(self) -> None:
        """Drain, or make room for a suspect: the rows go back as they are."""
        if self.rows:
            self._give_back("drain" if self.draining else "preempt", list(self.rows.values()))
        elif self.draining:
            self.start()

    def _give_back(self, reason: ReleaseReason, rows: Sequence[Row]) -> None:
        keys = [row.key for row in rows]
        self.releases.append(self.world.scripts.release(self.owner, reason, keys))
        for key in keys:
            self.rows.pop(key[0])

    def _send_release(self) -> None:
        self._call(self.releases[0])
        self.releases.pop(0)

    def _drop(self, key: tuple[str, int]) -> None:
        """The row has left: its slot is free."""
        if self._row(key) is not None:
            del self.rows[key[0]]
            self.cramped = False
            self.next_take = min(self.next_take, time.monotonic())

    def _row(self, key: tuple[str, int]) -> Row | None:
        """The row of this very attempt: a late word about an older one finds nothing."""
        row = self.rows.get(key[0])
        return row if row is not None and row.key == key else None
