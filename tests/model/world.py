"""Everything one schedule consists of, made from its seed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from mlxq.protocol.keys import GROUP, LANES, Keys
from mlxq.protocol.scripts import Script, Scripts
from tests.model.ledger import Ledger, Violation
from tests.model.mix import Mix
from tests.model.network import Network
from tests.model.plan import POISON, Kind, Plan
from tests.model.reader import Hub, Reader
from tests.model.submitter import Aborter, Submitter
from tests.model.worker import Worker

NO_PATCHES: Mapping[str, Script] = {}
ENDLESS = 10_000  # tokens that no schedule has time for
MAX_CRASHES = 4  # instead of 10: a schedule is short


class World:
    """Actors, network and truth of one schedule. One thread; nothing but the seed is random."""

    def __init__(
        self,
        client: redis.Redis,
        queue: str,
        seed: int,
        mix: Mix,
        patched: Mapping[str, Script] = NO_PATCHES,
    ) -> None:
        self.client = client
        self.mix = mix
        self.faulty = True
        self.stalled = False  # an owner was too slow for its lease, on purpose or not
        self.max_crashes = MAX_CRASHES
        self.rng = random.Random(seed)
        self.keys = Keys(queue)
        self.scripts = Scripts(self.keys)
        self.plans = make_plans(self.rng, mix)
        self.ledger = Ledger(list(self.plans.values()), self)
        self.faults: Counter[str] = Counter()
        self.net = Network(client, self.rng, self.ledger, self.faults, patched)
        self.net.mix = mix
        self.hub = Hub(client, self.keys)
        self.pumped = 0  # calls before the subscription was last read
        self.owners = 0
        self.tampered: set[str] = set()
        self.late_keys: set[str] = set()  # jobs whose abort key was set after their end
        self.submitters = [Submitter(self, plan) for plan in self.plans.values()]
        self.aborters = [
            Aborter(self, plan) for plan in self.plans.values() if self.rng.random() < mix.abort
        ]
        self.readers = [Reader(self, job_id) for job_id in self.plans for _ in range(2)]
        self.workers = [Worker(self, f"w{n}") for n in range(self.rng.randint(*mix.workers))]

    def plan(self, job_id: str) -> Plan:
        return self.plans[job_id]

    def new_owner(self, name: str) -> str:
        self.owners += 1
        return f"{name}.{self.owners}"

    def chance(self, fault: str) -> bool:
        """Whether this fault of the mix happens now. Never, once the faults have stopped."""
        rate: float = getattr(self.mix, fault)
        happens = self.faulty and rate > 0 and self.rng.random() < rate
        self.faults[fault] += happens
        return happens

    def calm(self) -> None:
        """No more faults from here on: everything must come to its end."""
        self.faulty = False
        self.net.mix = Mix()
        self.net.cut_until.clear()

    def check(self, promise: bool, broken: str) -> None:
        if not promise:
            raise Violation(broken)

    def pump(self) -> None:
        """Brings what was published to the readers."""
        if self.pumped != self.net.calls:
            self.hub.pump()
            self.pumped = self.net.calls

    def watch(self, worker: Worker, now: float) -> None:
        """Notes an owner that may have lost its lease although it lives."""
        self.stalled |= now - worker.last_beat > 0.8 * worker.lease_s

    def lose_group(self) -> None:
        """An operator's mistake: the pending list of one lane is gone."""
        lane = self.rng.choice(LANES)
        if self.client.exists(self.keys.lane(lane)):
            self.client.xgroup_destroy(self.keys.lane(lane), GROUP)
            self.net.note("XGROUP DESTROY", lane)
            for job in self.ledger.jobs.values():
                if job.plan.lane == lane and job.current:
                    job.current.regrouped = True

    def stray(self) -> None:
        """Another one: an entry for a job that has one, has ended, or never was."""
        job_id = self.rng.choice([*self.plans, "ghost"])
        self.client.xadd(self.keys.lane(self.rng.choice(LANES)), {"id": job_id})
        self.net.note("stray entry", job_id)

    def tamper(self) -> None:
        """And another: the transcript of a live job goes on without its hash.

        Nothing is lost where nothing was stored: TAKE begins such a transcript anew.
        """
        live = [i for i in self.unfinished() if i not in self.tampered]
        if live:
            job_id = self.rng.choice(live)
            self.tampered.add(job_id)
            self.client.xadd(self.keys.events(job_id), {"e": '{"type":"junk"}'}, id="1000-1000")
            state, seq = self._fields([job_id], "state", "seq")[0]
            self.ledger.jobs[job_id].tampered = (state, seq) != (b"queued", b"0")
            self.net.note("tampered transcript", job_id)

    def lanes(self) -> int:
        """Entries in all lanes."""
        return sum(int(self.client.xlen(self.keys.lane(lane))) for lane in LANES)

    def unfinished(self) -> list[str]:
        """Jobs that exist and are not terminal."""
        ids = [job.plan.id for job in self.ledger.jobs.values() if job.enqueued]
        return self.among(ids, b"queued", b"running")

    def among(self, ids: list[str], *states: bytes) -> list[str]:
        """Those of these jobs that are in one of the states."""
        found = self._fields(ids, "state")
        return [i for i, (state,) in zip(ids, found, strict=True) if state in states]

    def waiting(self, ids: list[str]) -> tuple[list[str], list[str]]:
        """Those of these jobs that lack nothing but a slot, and those that need an empty worker."""
        free: list[str] = []
        suspects: list[str] = []
        answers = self._fields(ids, "state", "strikes", "deadline")
        now_ms = time.time() * 1000
        for job_id, (state, strikes, deadline) in zip(ids, answers, strict=True):
            if state == b"queued" and not 0 < int(deadline or 0) < now_ms:
                (suspects if int(strikes or 0) else free).append(job_id)
        return free, suspects

    def _fields(self, ids: Sequence[str], *fields: str) -> list[list[Any]]:
        if not ids:
            return []
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hmget(self.keys.job(job_id), *fields)
            answers: list[list[Any]] = pipe.execute()
        return answers


def make_plans(rng: random.Random, mix: Mix) -> dict[str, Plan]:
    plans = {}
    for number in range(rng.randint(*mix.jobs)):
        dice = rng.random()
        kind: Kind = "good"
        if dice < mix.poison:
            kind = rng.choice(POISON)
        elif dice < mix.poison + mix.bad:
            kind = "bad"
        length = rng.randint(*mix.length) if kind != "stubborn" else ENDLESS
        lane = rng.choice(LANES)
        deadline_ms = rng.randint(1, 60) if rng.random() < mix.deadline else 0
        plans[f"j{number}"] = Plan(f"j{number}", kind, length, lane, deadline_ms)
    return plans
