"""Carries out the planned faults, and makes everything good again in the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from mlxq.protocol.keys import LANES
from mlxq.protocol.scripts import script
from ops.lib.soak.fleet import Member
from ops.lib.soak.line import Line, Loss
from ops.lib.soak.plan import SCRIPTS, FaultPlan
from ops.lib.soak.world import World

LOSSES: tuple[Loss, ...] = ("request", "reply", "reply", "silence")


class Faults:
    """One round's faults. Those of one thing (a member, a line, the server) do not overlap."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._news = world.news
        self._server_busy = asyncio.Lock()

    async def run(self, plans: Sequence[FaultPlan]) -> None:
        """All of them at their times; returns when the last has passed."""
        async with asyncio.TaskGroup() as tasks:
            for plan in plans:
                tasks.create_task(self._at(plan))

    async def _at(self, plan: FaultPlan) -> None:
        await asyncio.sleep(plan.at_s)
        action: Callable[[FaultPlan], Awaitable[None]] = getattr(self, f"_{plan.kind}")
        self._news.faults[plan.kind] += 1
        with suppress(RedisError, OSError):  # the server is away by another fault
            await action(plan)

    def _member(self, plan: FaultPlan) -> Member:
        member = self._world.members[plan.target % len(self._world.members)]
        self._news.say(f"{plan.kind} {member.name}, {plan.length_s:.2f} s")
        return member

    def _line(self, plan: FaultPlan) -> Line:
        number = plan.target % len(self._world.lines)
        workers = len(self._world.members)
        name = f"w{number + 1}" if number < workers else f"p{number - workers}"
        self._news.say(f"{plan.kind} {name}, {plan.length_s:.2f} s")
        return self._world.lines[number]

    async def _kill(self, plan: FaultPlan) -> None:
        self._member(plan).kill()

    async def _freeze(self, plan: FaultPlan) -> None:
        member = self._member(plan)
        if not member.frozen:
            member.freeze()
            await asyncio.sleep(plan.length_s)
            member.thaw()

    async def _drain(self, plan: FaultPlan, times: int = 1) -> None:
        member = self._member(plan)
        pid = member.pid
        if member.frozen or pid is None:
            return
        member.drain(times)
        if not await member.ended(pid):
            self._news.breach(f"{member.name} was told to drain and does not end")

    async def _release(self, plan: FaultPlan) -> None:
        await self._drain(plan, 2)

    async def _clock(self, plan: FaultPlan) -> None:
        number = (signal.SIGUSR1, signal.SIGUSR2)[plan.choice % 2]
        self._member(plan).jump(number)

    async def _cut(self, plan: FaultPlan) -> None:
        self._line(plan).cut()

    async def _hold(self, plan: FaultPlan) -> None:
        line = self._line(plan)
        line.open.clear()
        await asyncio.sleep(plan.length_s)
        line.open.set()

    async def _delay(self, plan: FaultPlan) -> None:
        line = self._line(plan)
        line.delay_s = plan.length_s / 10
        await asyncio.sleep(3 * plan.length_s)
        line.delay_s = 0.0

    async def _down(self, plan: FaultPlan) -> None:
        line = self._line(plan)
        line.down = True
        line.cut()
        await asyncio.sleep(plan.length_s)
        line.down = False

    async def _lose(self, plan: FaultPlan) -> None:
        name = SCRIPTS[plan.choice % len(SCRIPTS)]
        what = LOSSES[plan.choice // len(SCRIPTS) % len(LOSSES)]
        self._news.say(f"lose: {what} of {name}")
        self._line(plan).lose(script(name).sha.encode(), what)

    async def _client_kill(self, plan: FaultPlan) -> None:
        await self._server("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def _pubsub_kill(self, plan: FaultPlan) -> None:
        await self._server("CLIENT", "KILL", "TYPE", "pubsub")

    async def _script_flush(self, plan: FaultPlan) -> None:
        await self._server("SCRIPT", "FLUSH")

    async def _group_lost(self, plan: FaultPlan) -> None:
        keys = self._world.shards[plan.target % len(self._world.shards)]
        lane = keys.lane(LANES[plan.choice % len(LANES)])
        await self._server("XGROUP", "DESTROY", lane, "workers")

    async def _restart(self, plan: FaultPlan) -> None:
        async with self._server_busy:
            self._news.say(f"restart of the server, away {plan.length_s:.2f} s")
            await self._world.restart_server(plan.length_s)

    async def _server_freeze(self, plan: FaultPlan) -> None:
        async with self._server_busy:
            self._news.say(f"server stopped for {plan.length_s:.2f} s")
            process = self._world.server.process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(plan.length_s)
            process.send_signal(signal.SIGCONT)

    async def _full(self, plan: FaultPlan) -> None:
        await self._server("CONFIG", "SET", "maxmemory", "1mb")
        await asyncio.sleep(plan.length_s)
        await self._world.insist(lambda: self._server("CONFIG", "SET", "maxmemory", "0"))

    async def _server(self, *command: str) -> Any:
        self._news.say(" ".join(command))
        return await self._world.client.execute_command(*command)  # type: ignore[no-untyped-call]

    async def heal(self) -> None:
        """Nothing fails from now on; what is dead comes back by itself."""
        for line in self._world.lines:
            line.heal()
        for member in self._world.members:
            member.thaw()
        await self._world.insist(lambda: self._server("CONFIG", "SET", "maxmemory", "0"))
        self._news.say("the faults are over")
