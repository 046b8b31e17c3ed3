"""Runs one schedule: a random actor takes a step, again and again, until all is at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import redis

from mlxq.protocol.scripts import Script
from tests.model.ledger import Violation
from tests.model.mix import Mix
from tests.model.promises import check_promises
from tests.model.world import NO_PATCHES, World

CALM_STEPS = 4_000  # ten times what the slowest of many honest endings took
LOOK_EVERY = 40
NAP_S = 0.001


class Actor(Protocol):
    def step(self) -> bool: ...


class Ending(Actor, Protocol):
    @property
    def done(self) -> bool: ...


@dataclass
class Counts:
    """What a number of schedules covered."""

    schedules: int = 0
    calls: int = 0
    jobs: int = 0
    attempts: int = 0
    events: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, world: World, ends: list[str]) -> None:
        self.schedules += 1
        self.calls += world.net.calls
        self.jobs += len(ends)
        self.attempts += sum(len(job.handouts) for job in world.ledger.jobs.values())
        self.events += sum(len(events) for events in world.hub.published.values())
        self.ends.update(ends)
        self.faults += world.faults


def run_schedule(
    client: redis.Redis,
    queue: str,
    seed: int,
    mix: Mix,
    patched: Mapping[str, Script] = NO_PATCHES,
    counts: Counts | None = None,
) -> None:
    """One schedule, then every promise. Raises Violation with the seed and the last actions."""
    world = World(client, queue, seed, mix, patched)
    try:
        _play(world)
        ends = check_promises(world)
        if counts is not None:
            counts.add(world, ends)
    except Violation as broken:
        told = "\n".join(" ".join(map(str, action)) for action in world.net.actions)
        raise type(broken)(f"seed {seed}: {broken}\nlast actions:\n{told}\n{mix}") from None
    finally:
        world.hub.close()
        _clear(client, world)


def _play(world: World) -> None:
    for step in range(world.mix.fault_steps):
        if step % LOOK_EVERY == 0 and _at_end(world):
            break
        _step(world)
    world.calm()
    for step in range(CALM_STEPS):
        if step % LOOK_EVERY == 0 and _at_end(world):
            return
        _step(world)
    raise Violation(f"stuck: {world.unfinished()} never ended")


def _step(world: World) -> None:
    """One step of one actor that has something to do; if none has, time passes."""
    if world.faulty:
        _disturb(world)
    if world.rng.random() < 0.05 and world.net.run_late():
        return
    actors: list[Actor] = [*world.submitters, *world.aborters, *world.readers]
    actors += world.workers * 4
    world.rng.shuffle(actors)
    if not any(actor.step() for actor in actors):
        if not any([worker.bell_rang() for worker in world.workers]):
            time.sleep(NAP_S)


def _disturb(world: World) -> None:
    if world.chance("group_lost"):
        world.lose_group()
    if world.chance("stray"):
        world.stray()
    if world.chance("tampered"):
        world.tamper()
    worker = world.rng.choice(world.workers)
    if world.chance("kill"):
        worker.crash()
    if world.chance("pause"):
        worker.pause()
    if world.chance("cut"):
        world.net.cut(worker.name, worker.lease_s * world.rng.uniform(0.5, 2.5))
    if world.chance("drain"):
        worker.draining = True
    if world.chance("engine_dies") and worker.rows:
        worker.engine_dies()


def _at_end(world: World) -> bool:
    if world.net.late or not all(submitter.done for submitter in world.submitters):
        return False
    if world.faults["stray"] and world.lanes():
        return False
    # Readers of a job that was never created wait for ever.
    readers = [reader for reader in world.readers if world.ledger.jobs[reader.job_id].enqueued]
    ending: list[Ending] = [*world.aborters, *readers]
    return all(actor.done for actor in ending) and not world.unfinished()


def _clear(client: redis.Redis, world: World) -> None:
    keys = list(client.scan_iter(f"{world.keys.tag}:*", count=1000))
    if keys:
        client.unlink(*keys)
