"""Submitters, and whoever else sets abort keys (PROTOCOL section 9)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlxq.protocol.scripts import Call, Enqueued
from tests.model.network import Lost
from tests.model.plan import Plan

if TYPE_CHECKING:
    from tests.model.world import World

RETENTION_MS = 600_000
REPLAY_MS = 300_000
RETRY_S = 0.002


class Submitter:
    """Submits one job: repeats the same bytes until answered, or gives up with ABORT."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.name = f"submitter-{plan.id}"
        self.enqueue: Call[Enqueued] = world.scripts.enqueue(
            plan.id,
            plan.spec,
            lane=plan.lane,
            deadline_ms=plan.deadline_ms,
            cap=world.mix.cap,
            retention_ms=RETENTION_MS,
            replay_ms=REPLAY_MS,
        )
        self.unanswered = False
        self.giving_up = False
        self.retry_at = 0.0
        self.done = False

    def step(self) -> bool:
        if self.done or time.monotonic() < self.retry_at:
            return False
        try:
            if self.giving_up:
                self.world.net.call(self.name, self.world.scripts.abort(self.plan.id))
                self.done = True
            else:
                self._submit()
        except Lost:
            self.unanswered = True
            if not self.giving_up and self.world.chance("give_up"):
                self.giving_up = True
        return True

    def _submit(self) -> None:
        reply = self.world.net.call(self.name, self.enqueue)
        if reply.status == "full":
            # A try without an answer may still run later: only ABORT settles it.
            self.giving_up = self.unanswered
            self.retry_at = time.monotonic() + RETRY_S
            return
        self.world.check(reply.status in ("ok", "dup"), f"{self.name} was told {reply}")
        cap = self.world.mix.cap
        self.world.check(not cap or self.world.lanes() <= cap, f"{self.name} got in over the cap")
        self.world.ledger.jobs[self.plan.id].confirmed = True
        self.done = True


class Aborter:
    """Aborts one job at any moment, once or twice, by script or by a bare SET."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.name = f"aborter-{plan.id}"
        self.left = world.rng.choice((1, 1, 2))
        self.by_script = world.rng.random() < 0.5

    @property
    def done(self) -> bool:
        return self.left == 0

    def step(self) -> bool:
        if self.done or (self.world.faulty and self.world.rng.random() < 0.9):
            return False
        try:
            if self.by_script:
                self.world.net.call(self.name, self.world.scripts.abort(self.plan.id))
            else:
                self._set_key()
        except Lost:
            return True
        self.left -= 1
        self.by_script = self.world.rng.random() < 0.5
        return True

    def _set_key(self) -> None:
        world, job = self.world, self.world.ledger.jobs[self.plan.id]
        keys = world.keys
        with world.client.pipeline(transaction=True) as pipe:
            pipe.set(keys.abort(self.plan.id), 1, ex=3600)
            pipe.hmget(keys.job(self.plan.id), "state", "seq")
            _, (state, seq) = pipe.execute()
        world.net.note(self.name, "SET abort key", state, seq)
        if state in (b"done", b"failed"):
            world.late_keys.add(self.plan.id)
        elif job.doomed is None:
            job.doomed = int(seq or 0)
