"""The loads of the control-plane benchmark, and what comes back of each."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from mlxq.producer import Failed, Producer, Started, Token
from mlxq.protocol.jobs import Job, encode_job
from mlxq.protocol.keys import LANES, Keys
from mlxq.protocol.scripts import Scripts, run, run_all
from ops.lib.bench.measure import cpu_s
from ops.lib.bench.workload import Run, Trace, Workload, check
from ops.lib.logs import whole_lines
from ops.lib.stack import Stack
from ops.lib.synthetic import STAMPS

PROMPT = "Hi"
ENQUEUED_TOGETHER = 500
_LOOK_S = 0.005


def now_s() -> float:
    """The clock that `--stamp` writes into ids."""
    return time.monotonic_ns() / 1e9


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of all parties: the worker, the server, and this process, which reads."""

    worker: float
    server: float
    reader: float

    @classmethod
    def of(cls, stack: Stack, worker: str) -> Cpu:
        pids = (stack.workers[worker].pid, stack.server_pid, os.getpid())
        return cls(*map(cpu_s, pids))

    def us_since(self, before: Cpu, count: int) -> dict[str, float]:
        """Microseconds spent since `before`, for each of `count`."""
        return {
            f"{party}_us": (getattr(self, party) - getattr(before, party)) / count * 1e6
            for party in ("worker", "server", "reader")
        }


async def stream(producer: Producer, jobs: int, tokens: int) -> Run:
    """So many jobs at once, all read to their end. Times are those of `now_s`."""

    async def read() -> Trace:
        job = await producer.submit(prompt=PROMPT, max_tokens=tokens)
        trace = Trace([], [])
        async for event in job.events():
            if isinstance(event, Token):
                trace.ids.extend(event.ids)
                trace.at_s.extend([now_s()] * len(event.ids))
            elif isinstance(event, Failed):
                raise RuntimeError(f"{job} failed: {event.message}")
        return trace

    run = Run(await asyncio.gather(*(read() for _ in range(jobs))))
    return check(run, Workload([PROMPT] * jobs, tokens))


def tokens_per_s(run: Run) -> float:
    """Over the time in which all jobs streamed, or from the first id of all to the last."""
    begin_s = max(trace.at_s[0] for trace in run.traces)
    end_s = min(trace.at_s[-1] for trace in run.traces)
    if begin_s >= end_s:
        begin_s = min(trace.at_s[0] for trace in run.traces)
        end_s = max(trace.at_s[-1] for trace in run.traces)
    arrived = sum(begin_s < at_s <= end_s for trace in run.traces for at_s in trace.at_s)
    return arrived / (end_s - begin_s)


def stamped_ms(token: int, at_s: float) -> float:
    """From the time that a stamped id holds until `at_s`."""
    return (at_s * 1e6 - token) % STAMPS / 1e3


def delays_ms(run: Run) -> list[float]:
    """From the choice of an id in the engine until the iterator had it, of stamped ids."""
    return [
        stamped_ms(token, at_s)
        for trace in run.traces
        for token, at_s in zip(trace.ids, trace.at_s, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Starts:
    """How soon jobs began, job by job.

    start_ms  from before submit until the worker handed the job to its engine
    read_ms   from before submit until `started` was read
    """

    start_ms: list[float]
    read_ms: list[float]
    jobs_per_s: float


async def starts(
    stack: Stack, worker: str, producer: Producer, *, jobs: int, in_flight: int, tokens: int
) -> Starts:
    """Each of `in_flight` submitters submits its next job when its last one has ended."""
    asked_s: dict[str, float] = {}
    read_ms: list[float] = []

    async def submit_in_turn() -> None:
        for _ in range(-(-jobs // in_flight)):
            began_s = time.time()
            job = await producer.submit(prompt=PROMPT, max_tokens=tokens)
            asked_s[job.id] = began_s
            async for event in job.events():
                if isinstance(event, Started):
                    read_ms.append((time.time() - began_s) * 1e3)

    before_s = time.time()
    await asyncio.gather(*(submit_in_turn() for _ in range(in_flight)))
    jobs_per_s = len(asked_s) / (time.time() - before_s)
    admitted_s = admissions(stack.workers[worker].log)
    start_ms = [(admitted_s[job_id] - since_s) * 1e3 for job_id, since_s in asked_s.items()]
    return Starts(start_ms, read_ms, jobs_per_s)


def admissions(log: Path) -> dict[str, float]:
    """When the worker handed its jobs to the engine: seconds of the epoch, by job id."""
    entries = map(msgspec.json.decode, whole_lines(log))
    return {
        entry["job"]: datetime.fromisoformat(entry["timestamp"]).timestamp()
        for entry in entries
        if entry["event"] == "admitted"
    }


async def drain(stack: Stack, worker: str, jobs: int) -> dict[str, float]:
    """A queue full of jobs of one token, which nobody reads, until it is empty.

    The worker sleeps while they are enqueued. The time is the server's: first TAKE to last FINISH.
    """
    scripts = Scripts(Keys(stack.queue))
    spec = encode_job(Job(prompt=PROMPT, max_tokens=1))
    calls = [scripts.enqueue(uuid.uuid4().hex, spec, cap=0) for _ in range(jobs)]
    async with Redis.from_url(stack.url, retry=Retry(NoBackoff(), 0)) as client:
        process = stack.workers[worker].process
        process.send_signal(signal.SIGSTOP)
        await run(client, calls[0])
        for start in range(1, jobs, ENQUEUED_TOGETHER):
            await run_all(client, calls[start : start + ENQUEUED_TOGETHER])
        before = Cpu.of(stack, worker)
        process.send_signal(signal.SIGCONT)
        lanes = [scripts.keys.lane(lane) for lane in LANES]
        left = jobs
        while left:
            await asyncio.sleep(_LOOK_S)
            left = sum([await client.xlen(lane) for lane in lanes])
        spent = Cpu.of(stack, worker).us_since(before, jobs)
        pipeline = client.pipeline(transaction=False)
        for call in calls:
            pipeline.hmget(call.key, ["taken", "finished"])
        times: list[Any] = await pipeline.execute()
    took_ms = max(int(finished) for _, finished in times) - min(int(taken) for taken, _ in times)
    return {"jobs_per_s": jobs / took_ms * 1e3, **spent}
