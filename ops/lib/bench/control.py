"""What mlxq itself costs: everything but the model, which a synthetic one stands in for.

One real worker process, one real server, and this process as submitter and reader, all on the same
few cores where the system can do that. Every round measures the limits of redis-py as well, so that
ratios compare neighbours in time: a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from mlxq.producer import Producer
from ops.lib.bench import load, plain
from ops.lib.bench.control_report import Numbers, report
from ops.lib.bench.load import Cpu
from ops.lib.bench.measure import Report, machine, percentile, short, tell
from ops.lib.bench.options import at_least
from ops.lib.stack import Stack

HELP = "tokens and jobs per second, CPU per token and latency of all but the model"
WORKER = "bench"

BATCHES = (1, 32, 128, 256)
WARM_TOKENS = 100
MOST_TOKENS = 4_000  # per job: the events of longer ones are made larger
PACED_BATCH, PACED_TOKENS_PER_S = 128, 40_000
CALM_BATCH, CALM_TOKENS_PER_S = 32, 2_000
IN_FLIGHT, STEP_MS, TOKENS_IN_100_MS = 16, 2.0, 50
STARTS_PER_S = 150
DRAIN_BATCHES = (32, 128)
PLAIN_MESSAGES_PER_S = 50_000

STREAMS = {
    **{f"b{batch}": f"batch {batch}, at full speed" for batch in BATCHES},
    "paced": f"batch {PACED_BATCH}, at {PACED_TOKENS_PER_S:,} a second",
    "calm": f"batch {CALM_BATCH}, at {CALM_TOKENS_PER_S:,} a second",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least(1), default=3, metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="per load")
    parser.add_argument("--jobs", type=at_least(IN_FLIGHT), default=5_000, metavar="N")
    parser.add_argument("--cores", type=at_least(1), default=2, metavar="N", help="used in all")


def measure(options: argparse.Namespace) -> Report:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[: options.cores]
        os.sched_setaffinity(0, cores)
    about = machine()
    sizes = {name: getattr(options, name) for name in ("seconds", "jobs", "cores")}
    rounds = []
    for number in range(1, options.rounds + 1):
        rounds.append(asyncio.run(one_round(options)))
        tell(f"round {number}: {summary(rounds[-1])}")
    return report(rounds, STREAMS, {**sizes, "machine": about})


def summary(numbers: Numbers) -> str:
    return ", ".join(
        f"{name} {short(numbers[name])}"
        for name in ("plain.publish", "b128.tokens_per_s", "b128.worker_us", "calm.p99_ms")
    )


async def one_round(options: argparse.Namespace) -> Numbers:
    """All loads one after the other, each with a worker and a server of its own."""
    seconds: float = options.seconds
    found = named("plain", await limits(seconds))
    for batch in BATCHES:
        found |= named(f"b{batch}", await streams(batch, seconds))
    paced = await streams(PACED_BATCH, seconds, PACED_TOKENS_PER_S)
    calm = await streams(CALM_BATCH, seconds, CALM_TOKENS_PER_S, stamped=True)
    found |= named("paced", paced) | named("calm", calm)
    found |= named("starts", await starts(round(seconds * STARTS_PER_S), TOKENS_IN_100_MS))
    found |= named("short", await starts(options.jobs, 1))
    for batch in DRAIN_BATCHES:
        found |= named(f"drain{batch}", await drain(batch, options.jobs))
    return found


def named(load: str, numbers: Numbers) -> Numbers:
    return {f"{load}.{name}": value for name, value in numbers.items()}


def stack(batch: int, *options: str) -> Stack:
    return Stack(None, "bench", "--max-batch", str(batch), *options)


async def limits(seconds: float) -> Numbers:
    """redis-py alone; its latency under the load that mlxq has when it is calm."""
    with stack(1) as idle:
        step_s = CALM_BATCH / CALM_TOKENS_PER_S
        publish = plain.publish_per_s(idle.url, seconds)
        receive = await plain.receive_per_s(idle.url, round(PLAIN_MESSAGES_PER_S * seconds))
        delays = await plain.delays_ms(
            idle, batch=CALM_BATCH, step_s=step_s, steps=round(seconds / step_s)
        )
    return {"publish": publish, "receive": receive, **p50_p99(delays)}


def p50_p99(delays_ms: list[float]) -> Numbers:
    return {"p50_ms": percentile(delays_ms, 50), "p99_ms": percentile(delays_ms, 99)}


async def streams(
    batch: int, seconds: float, tokens_per_s: float = 0, *, stamped: bool = False
) -> Numbers:
    """A full batch, paced, or as fast as the worker can. Stamps tell delays, and have no text."""
    step_ms = 1e3 * batch / tokens_per_s if tokens_per_s else 0.0
    options = ["--step-ms", str(step_ms), *["--stamp"] * stamped]
    with stack(batch, *options) as running:
        worker = running.start_worker(WORKER)
        await running.serving(WORKER)
        async with Producer(running.url, queue=running.queue) as producer:
            warm = await worker.during(load.stream(producer, batch, WARM_TOKENS))
            per_job = seconds * load.tokens_per_s(warm) / batch
            tokens = min(MOST_TOKENS, max(WARM_TOKENS, round(per_job)))
            before = Cpu.of(running, WORKER)
            run = await worker.during(load.stream(producer, batch, tokens))
            spent = Cpu.of(running, WORKER).us_since(before, batch * tokens)
    return {
        "tokens_per_s": load.tokens_per_s(run),
        "ids_per_event": run.tokens_per_arrival(),
        **spent,
        **(p50_p99(load.delays_ms(run)) if stamped else {}),
    }


async def starts(jobs: int, tokens: int) -> Numbers:
    """How soon jobs begin that come while others run."""
    with stack(2 * IN_FLIGHT, "--step-ms", str(STEP_MS)) as running:
        worker = running.start_worker(WORKER)
        await running.serving(WORKER)
        async with Producer(running.url, queue=running.queue) as producer:
            for number in (IN_FLIGHT, jobs):  # the first few warm it up
                before = Cpu.of(running, WORKER)
                found = await worker.during(
                    load.starts(
                        *(running, WORKER, producer),
                        jobs=number,
                        in_flight=IN_FLIGHT,
                        tokens=tokens,
                    )
                )
            spent = Cpu.of(running, WORKER).us_since(before, jobs)
    return {
        "start_ms": percentile(found.start_ms, 50),
        "read_ms": percentile(found.read_ms, 50),
        "jobs_per_s": found.jobs_per_s,
        **spent,
    }


async def drain(batch: int, jobs: int) -> Numbers:
    """How fast one worker empties a full queue of one-token jobs."""
    with stack(batch, "--step-ms", "0") as running:
        worker = running.start_worker(WORKER)
        await running.serving(WORKER)
        await worker.during(load.drain(running, WORKER, batch))
        return await worker.during(load.drain(running, WORKER, jobs))
