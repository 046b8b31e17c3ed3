"""One round after the other on one world."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ops.lib.soak.check import check_round, pass_time
from ops.lib.soak.faults import Faults
from ops.lib.soak.health import Health
from ops.lib.soak.load import Load
from ops.lib.soak.news import Violation
from ops.lib.soak.plan import plan_round
from ops.lib.soak.settle import settle
from ops.lib.soak.world import World


@dataclass
class Progress:
    """What a view shows. `stage`: faults, settling, checking."""

    round: int = 0
    stage: str = "starting"
    jobs: int = 0
    done: int = 0
    longest_settle_s: float = 0.0


class Rounds:
    """Runs rounds of a seed. Loop of the world."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._seed = seed
        self._load: Load | None = None
        self.health = Health(world)
        self.progress = Progress()

    def refresh(self) -> Progress:
        """The progress as of now."""
        if self._load is not None:
            self.progress.done = sum(job.done for job in self._load.jobs)
        return self.progress

    async def run(self, number: int) -> None:
        """One round, from its first submit to its last check. Raises Violation."""
        world, progress = self._world, self.progress
        plan = plan_round(self._seed, number, world.shape)
        world.news.begin()
        breaks = any(job.fault in ("raise", "hang", "poison") for job in plan.jobs)
        for member in world.members:
            member.may_break = breaks
        self._load = Load(world, plan.jobs)
        progress.round, progress.stage, progress.jobs = number, "faults", len(plan.jobs)
        for job in plan.jobs:
            if job.fault:
                world.news.faults[f"job: {job.fault}"] += 1
        faults = Faults(world)
        load = asyncio.create_task(self._load.run())
        try:
            await faults.run(plan.faults)
            await faults.heal()
            progress.stage = "settling"
            settled_s = await settle(world, self._load.jobs, load)
        except BaseException:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            raise
        progress.longest_settle_s = max(progress.longest_settle_s, settled_s)
        progress.stage = "checking"
        await check_round(world, self._load.jobs)
        await pass_time(world)
        await self.health.check()
        world.news.check()
        world.news.counts["rounds"] += 1


def report_violation(world: World, seed: int, number: int, broken: Violation) -> str:
    """All that is needed to look into it."""
    lines = ["", f"VIOLATION in round {number} of seed {seed}", str(broken), "", "the last events:"]
    lines += world.news.lines
    lines += ["", f"again: ops/soak --seed {seed} --first-round {number}"]
    return "\n".join(lines)
