"""`ops/soak`: rounds of random faults until the time is up or a promise breaks."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ops.lib.server import binary
from ops.lib.soak.news import Violation
from ops.lib.soak.plan import Shape
from ops.lib.soak.rounds import Rounds, report_violation
from ops.lib.soak.world import World, standing
from ops.lib.stack import guarded


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no round after that")
    parser.add_argument("--rounds", type=int, help="at most so many rounds")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--first-round", type=int, default=1, help="to see one again")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=1, help="over which the queue is split")
    parser.add_argument("--jobs", type=int, default=Shape.jobs, help="jobs in a round")
    parser.add_argument("--seconds", type=float, default=Shape.seconds, help="of faults in a round")
    parser.add_argument("--server", choices=("valkey", "redis"), default="valkey")
    options = parser.parse_args()
    path = server_path(options.server)
    if path is None:
        print(f"ops/soak: there is no {options.server} server on this machine", file=sys.stderr)
        return 2
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    return guarded(lambda: asyncio.run(soak(options, path)))


def server_path(name: str) -> str | None:
    """The binary of the server of that name."""
    if name == "redis":
        return shutil.which("redis-server")
    os.environ.pop("MLXQ_TEST_SERVER", None)
    return binary()


async def soak(options: argparse.Namespace, path: str) -> int:
    """Returns 0, or 1 after a violation."""
    console = Console()
    logging.getLogger("mlxq.producer").setLevel(logging.CRITICAL)  # it tells of every outage
    setting = f"{options.workers} workers, {options.shards} shards, {options.server}"
    console.print(f"seed {options.seed}, {setting}", highlight=False)
    shape = Shape(jobs=options.jobs, seconds=options.seconds)
    async with standing(path, shape, options.workers, options.shards) as world:
        rounds, how, broken = Rounds(world, options.seed), "stopped", ""
        try:
            with showing(console, world, rounds):
                broken = await run_rounds(world, rounds, options)
            how = "violation" if broken else "ok"
        finally:
            console.print(table_of(world, rounds))
            told = "\n".join([*world.news.remarks, broken])
            console.print(told, markup=False, highlight=False, soft_wrap=True)
            print(json.dumps({"soak": how, **numbers_of(world, rounds, options)}))
    return 1 if broken else 0


async def run_rounds(world: World, rounds: Rounds, options: argparse.Namespace) -> str:
    """Returns an empty text when the time is up, or what was broken."""
    number, until_s = options.first_round, time.monotonic() + options.minutes * 60
    while time.monotonic() < until_s:
        if options.rounds and number >= options.first_round + options.rounds:
            break
        try:
            await rounds.run(number)
        except Violation as violation:
            return report_violation(world, options.seed, number, violation)
        number += 1
    return ""


@contextlib.contextmanager
def showing(console: Console, world: World, rounds: Rounds) -> Iterator[None]:
    """The progress while the block runs: live on a terminal, else a line at every new stage."""
    if console.is_terminal:
        with Live(get_renderable=lambda: table_of(world, rounds), console=console):
            yield
        return
    task = asyncio.get_running_loop().create_task(_lines(console, world, rounds))
    try:
        yield
    finally:
        task.cancel()


async def _lines(console: Console, world: World, rounds: Rounds) -> None:
    told = None
    while True:
        progress = rounds.refresh()
        if told != (progress.round, progress.stage):
            told = (progress.round, progress.stage)
            faults = sum(world.news.faults.values())
            console.print(
                f"round {progress.round} {progress.stage:<9} "
                f"{progress.done} of {progress.jobs} jobs done, {faults} faults so far",
                highlight=False,
            )
        await asyncio.sleep(0.2)


def table_of(world: World, rounds: Rounds) -> Table:
    progress, news, health = rounds.refresh(), world.news, rounds.health
    table = Table(
        title=f"round {progress.round}: {progress.stage}, "
        f"{progress.done} of {progress.jobs} jobs done",
        show_header=False,
    )
    for name, count in sorted(news.counts.items()):
        table.add_row(name, f"{count:,}")
    table.add_row("ends", _told(news.ends))
    table.add_row("faults", _told(news.faults))
    table.add_row("longest to settle", f"{progress.longest_settle_s:.1f} s")
    table.add_row("server, MiB", _range(health.server.mb))
    table.add_row("producers, MiB", _range(health.soak.mb))
    workers = [mb for memory in health.workers.values() for mb in memory.mb]
    table.add_row("workers, MiB", _range(workers))
    return table


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _range(mb: list[float]) -> str:
    return f"{min(mb):.1f} to {max(mb):.1f}, now {mb[-1]:.1f}" if mb else "-"


def numbers_of(world: World, rounds: Rounds, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers for the last line."""
    news, health = world.news, rounds.health
    lived = max((len(memory.mb) for memory in health.workers.values()), default=0)
    return {
        "seed": options.seed,
        "server": options.server,
        "workers": options.workers,
        "shards": options.shards,
        **dict(sorted(news.counts.items())),
        "ends": dict(news.ends),
        "faults": dict(news.faults),
        "longest_settle_s": round(rounds.progress.longest_settle_s, 2),
        "busiest_idle_process": round(health.busiest, 3),
        "server_mb": [round(mb, 1) for mb in health.server.mb],
        "producers_mb": [round(mb, 1) for mb in health.soak.mb],
        "worker_growth_mb": round(
            max((memory.growth_mb for memory in health.workers.values()), default=0.0), 1
        ),
        "longest_lived_worker_rounds": lived,
    }
