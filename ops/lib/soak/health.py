"""Between rounds: nobody spins while there is nothing to do, and nobody's memory grows."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from ops.lib.soak.gauge import cpu_s, resident_mb
from ops.lib.soak.news import Violation
from ops.lib.soak.world import World

LISTEN_S = 2.0
SPIN = 0.4  # of a core; an idle worker with a lease of 0.8 s takes a tenth of that
# A process whose memory is so far above what it was at first leaks. Round by round it moves by
# some MiB: the allocators keep what a busy round needed.
WARM_ROUNDS = 3
GROWTH_MB = 64.0
SERVER_GROWTH_MB = 16.0


@dataclass
class Memory:
    """MiB of one process at the end of each round it lived through."""

    mb: list[float] = field(default_factory=list)

    @property
    def growth_mb(self) -> float:
        """Since it was warm."""
        return self.mb[-1] - max(self.mb[:WARM_ROUNDS]) if len(self.mb) > WARM_ROUNDS else 0.0


class Health:
    """Watches the processes of a world from round to round."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.workers: dict[int, Memory] = {}
        self.soak = Memory()
        self.server = Memory()
        self.busiest = 0.0  # share of a core that the busiest idle process used

    async def check(self) -> None:
        """Raises Violation for a process that spins or leaks. Call it when all is idle."""
        await self._check_idle()
        for member in self._world.members:
            if member.pid and (mb := resident_mb(member.pid)) is not None:
                memory = self.workers.setdefault(member.pid, Memory())
                memory.mb.append(mb)
                _check(member.name, memory, GROWTH_MB)
        self.soak.mb.append(resident_mb(os.getpid()) or 0.0)
        _check("the producers' process", self.soak, GROWTH_MB)
        used: int = (await self._world.info())["used_memory"]
        self.server.mb.append(used / 2**20)
        _check("the server", self.server, SERVER_GROWTH_MB)

    async def _check_idle(self) -> None:
        pids = {member.pid: member.name for member in self._world.members if member.pid}
        pids[self._world.server_pid] = "the server"
        before = {pid: cpu_s(pid) for pid in pids}
        await asyncio.sleep(LISTEN_S)
        for pid, name in pids.items():
            first, last = before[pid], cpu_s(pid)
            if first is None or last is None:
                continue
            share = (last - first) / LISTEN_S
            self.busiest = max(self.busiest, share)
            if share > SPIN:
                raise Violation(f"{name} takes {share:.2f} of a core, being idle")


def _check(name: str, memory: Memory, most_mb: float) -> None:
    if memory.growth_mb > most_mb:
        told = ", ".join(f"{mb:.1f}" for mb in memory.mb)
        raise Violation(f"the memory of {name} grows: {told} MiB")
