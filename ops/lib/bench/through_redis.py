"""What the path through Redis costs, against mlx-lm's BatchGenerator alone.

The same greedy jobs go through BatchGenerator in a process of its own, and through submit, Redis,
worker and subscriber. Both sides are loaded and warm, and take turns, round by round, each idle
while the other runs. Then one job at a time, for the time to first token that the path adds.
Ratios and differences compare neighbours in time, because a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from mlxq.producer import Producer
from ops.lib.bench.measure import Report, Spread, columns, cpu_s, percentile, ratio, tell
from ops.lib.bench.sides import QueueSide, RawSide
from ops.lib.bench.workload import PROMPTS, Run, Workload
from ops.lib.stack import Stack

WORKER = "bench"
PREFILL_STEP = 512  # of both sides, at most
WARM_TOKENS = 4
LOW_LOAD_TOKENS = 4
LEAST_RATIO = 0.95
MOST_ADDED_TTFT_MS = 30.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side did in one round. `idle_cpu`: cores it used while the other side ran."""

    run: Run
    idle_cpu: float
    low_load_ttft_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Round:
    """Both sides, next to each other in time."""

    raw: Turn
    queue: Turn

    @property
    def ratio(self) -> float:
        return self.queue.run.tokens_per_s / self.raw.run.tokens_per_s

    @property
    def added_ttft_ms(self) -> float:
        """Median over pairs of neighbours, at low load."""
        pairs = zip(self.raw.low_load_ttft_ms, self.queue.low_load_ttft_ms, strict=True)
        return percentile([queue - raw for raw, queue in pairs], 50)

    @property
    def same_outputs(self) -> int:
        """Jobs for which both sides chose the same ids."""
        pairs = zip(self.raw.run.traces, self.queue.run.traces, strict=True)
        return sum(raw.ids == queue.ids for raw, queue in pairs)


METRICS: dict[str, tuple[str, Callable[[Turn], float]]] = {
    "tokens_per_s": ("tokens/s", lambda turn: turn.run.tokens_per_s),
    "ttft_p50_ms": ("first token p50 ms", lambda turn: turn.run.ttft_ms(50)),
    "ttft_p95_ms": ("first token p95 ms", lambda turn: turn.run.ttft_ms(95)),
    "gap_p50_ms": ("gap p50 ms", lambda turn: turn.run.gap_ms(50)),
    "gap_p95_ms": ("gap p95 ms", lambda turn: turn.run.gap_ms(95)),
    "tokens_per_arrival": ("tokens per arrival", lambda turn: turn.run.tokens_per_arrival()),
    "low_load_ttft_p50_ms": (
        "alone: first p50 ms",
        lambda turn: percentile(turn.low_load_ttft_ms, 50),
    ),
}


def measure(model: Path, options: argparse.Namespace) -> Report:
    settings = ("--max-batch", str(options.batch), "--prefill-step", str(PREFILL_STEP))
    with Stack(model, "bench", *settings) as stack:
        rounds = asyncio.run(run(stack, options))
    return report(rounds, options, model.name)


async def run(stack: Stack, options: argparse.Namespace) -> list[Round]:
    """Starts both sides, warms them up, and lets them take turns."""
    raw = await RawSide.start(stack, batch=options.batch, prefill_step=PREFILL_STEP)
    try:
        stack.start_worker(WORKER)
        await raw.loaded()
        await stack.serving(WORKER)
        async with Producer(stack.url, queue=stack.queue) as producer:
            queue = QueueSide(stack, producer, WORKER)
            warm = Workload(list(PROMPTS[: options.jobs]), WARM_TOKENS)
            await raw.run(warm)
            await queue.run(warm)
            rounds = []
            for number in range(1, options.rounds + 1):
                rounds.append(await one_round(raw, queue, options))
                tell(f"round {number}: {summary(rounds[-1])}")
            return rounds
    finally:
        await raw.close()


async def one_round(raw: RawSide, queue: QueueSide, options: argparse.Namespace) -> Round:
    workload = Workload(list(PROMPTS[: options.jobs]), options.tokens)
    raw_run, queue_idle = await watched(raw.run(workload), idle=queue.pid)
    queue_run, raw_idle = await watched(queue.run(workload), idle=raw.pid)
    one = Round(Turn(raw_run, raw_idle), Turn(queue_run, queue_idle))
    for prompt in PROMPTS[: options.low_load_jobs]:
        alone = Workload([prompt], LOW_LOAD_TOKENS)
        one.raw.low_load_ttft_ms.append((await raw.run(alone)).ttft_ms(50))
        one.queue.low_load_ttft_ms.append((await queue.run(alone)).ttft_ms(50))
    return one


async def watched(running: Awaitable[Run], *, idle: int) -> tuple[Run, float]:
    """A run, and how many cores the process with the pid `idle` used meanwhile."""
    before_s, started_s = cpu_s(idle), time.perf_counter()
    result = await running
    return result, (cpu_s(idle) - before_s) / (time.perf_counter() - started_s)


def summary(one: Round) -> str:
    return (
        f"raw {one.raw.run.tokens_per_s:.1f} tok/s, through Redis "
        f"{one.queue.run.tokens_per_s:.1f} tok/s, ratio {one.ratio:.3f}; "
        f"first token {one.added_ttft_ms:+.1f} ms at low load"
    )


def report(rounds: list[Round], options: argparse.Namespace, model: str) -> Report:
    metrics = {name: compare(rounds, value) for name, (_, value) in METRICS.items()}
    added = Spread.of([one.added_ttft_ms for one in rounds])
    met = {
        "tokens_per_s": metrics["tokens_per_s"]["ratio"].median >= LEAST_RATIO,
        "added_ttft_p50_ms": added.median < MOST_ADDED_TTFT_MS,
    }
    data = {
        **{name: getattr(options, name) for name in ("jobs", "tokens", "batch", "low_load_jobs")},
        **metrics,
        "added_ttft_p50_ms": added,
        "idle_cpu": {
            "raw": Spread.of([one.raw.idle_cpu for one in rounds]),
            "queue": Spread.of([one.queue.idle_cpu for one in rounds]),
        },
        "same_outputs": [one.same_outputs for one in rounds],
        "targets_met": met,
    }
    return Report(table(data, model, len(rounds)), data)


def compare(rounds: list[Round], value: Callable[[Turn], float]) -> dict[str, Spread]:
    """One metric on both sides, and their ratio, queue to raw, taken within each round."""
    raw = [value(one.raw) for one in rounds]
    queue = [value(one.queue) for one in rounds]
    return {"raw": Spread.of(raw), "queue": Spread.of(queue), "ratio": ratio(queue, raw)}


def table(data: dict[str, Any], model: str, rounds: int) -> Table:
    shown = columns(
        *("", "raw", "through Redis", "ratio"),
        title=f"{model}: {data['jobs']} jobs of {data['tokens']} tokens, batch {data['batch']}\n"
        f"median (smallest..largest) of {rounds} rounds",
        caption=verdict(data["targets_met"]),
    )
    for name, (label, _) in METRICS.items():
        shown.add_row(label, *map(str, data[name].values()))
    shown.add_row("alone: added p50 ms", "", str(data["added_ttft_p50_ms"]), "")
    shown.add_row("cores while paused", *map(str, data["idle_cpu"].values()), "")
    return shown


def verdict(met: dict[str, bool]) -> str:
    words = {name: "met" if yes else "missed" for name, yes in met.items()}
    return (
        f"tokens per second at a ratio of {LEAST_RATIO} or more: {words['tokens_per_s']}\n"
        f"less than {MOST_ADDED_TTFT_MS:.0f} ms added: {words['added_ttft_p50_ms']}"
    )
