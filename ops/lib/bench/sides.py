"""The two sides of the engine benchmark: raw BatchGenerator, and the whole path through Redis."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process

import msgspec

from mlxq.producer import Failed, Producer, Token
from ops.lib.bench.workload import Run, Trace, Workload, check
from ops.lib.bootstrap import ROOT
from ops.lib.stack import Stack

_LINE_BYTES = 64 << 20  # most that one Run may take as JSON


class RawSide:
    """`raw.py` in a process of its own, asked over pipes. Must be closed; the guard knows it."""

    def __init__(self, process: Process, stack: Stack) -> None:
        self._process = process
        self._stack = stack

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, stack: Stack, *, batch: int, prefill_step: int) -> RawSide:
        """Returns at once; the model loads meanwhile."""
        command = ["-m", "ops.lib.bench.raw", str(stack.model)]
        command += ["--batch", str(batch), "--prefill-step", str(prefill_step)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_BYTES,
            start_new_session=True,
        )
        stack.guard.add(process.pid)
        return cls(process, stack)

    async def loaded(self) -> None:
        """Returns once the model is loaded."""
        await self._line()

    async def run(self, workload: Workload) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(workload) + b"\n")
        return check(msgspec.json.decode(await self._line(), type=Run), workload)

    async def close(self) -> None:
        """Ends the program, whatever it is doing."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._stack.guard.discard(self.pid)

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"ops.lib.bench.raw ended with {await self._process.wait()}")
        return line


class QueueSide:
    """Submit, Redis, one `mlxq worker`, subscriber. The submitter is this process."""

    def __init__(self, stack: Stack, producer: Producer, worker: str) -> None:
        self._producer = producer
        self._worker = stack.workers[worker]

    @property
    def pid(self) -> int:
        return self._worker.pid

    async def run(self, workload: Workload) -> Run:
        return check(await self._worker.during(self._submit_all(workload)), workload)

    async def _submit_all(self, workload: Workload) -> Run:
        started_s = time.perf_counter()
        jobs = (self._job(prompt, workload.tokens, started_s) for prompt in workload.prompts)
        return Run(await asyncio.gather(*jobs))

    async def _job(self, prompt: str, tokens: int, started_s: float) -> Trace:
        job = await self._producer.submit(
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        trace = Trace([], [])
        async for event in job.events():
            if isinstance(event, Token):
                trace.ids.extend(event.ids)
                trace.at_s.extend([time.perf_counter() - started_s] * len(event.ids))
            elif isinstance(event, Failed):
                raise RuntimeError(f"{prompt!r} failed: {event.message}")
        return trace
