"""The scene of a chaos test: a server, worker processes, a producer, and what was promised."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlxq.producer import Producer
from mlxq.protocol.events import Done
from mlxq.protocol.keys import GROUP, LANES, Keys
from ops.lib.server import connect
from tests.chaos.reader import GUARD_S, Reader
from tests.chaos.worker import SyntheticProcess
from tests.server import Server

IDLE_S = 0.5
SPIN = 0.4  # part of a processor that an idle worker never needs
FOREVER = 900_000  # tokens


class House:
    """Starts with a server of its own and a producer, ends with everything killed.

    Every job submitted here is followed by a reader. `check` is the end of each test: it demands
    what must hold after any fault.
    """

    def __init__(
        self,
        queue: str,
        folder: Path,
        record: Callable[[str, object], None],
        *,
        lease_s: float = 0.5,
        max_batch: int = 4,
        step_ms: float = 4.0,
        server: Server | None = None,
    ) -> None:
        self.queue = queue
        self.keys = Keys(queue)
        self.lease_s = lease_s
        self.max_batch = max_batch
        self.server = server or Server()
        self.workers: dict[str, SyntheticProcess] = {}
        self.readers: list[Reader] = []
        self._producers: list[Producer] = []
        self._folder = folder
        self._record = record
        self._step_ms = step_ms
        self._fault_s: float | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.server.process is None:
            await asyncio.to_thread(self.server.start)
        self.client = connect(self.server.url)
        self.use_producer()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        for reader in self.readers:
            reader.stop()
        for worker in self.workers.values():
            worker.kill()
        for producer in self._producers:
            await producer.aclose()
        await self.client.aclose()
        self.server.stop()

    async def move_to(self, server: Server) -> None:
        """From now on this is the server that `client` talks to."""
        await self.client.aclose()
        self.client = connect(server.url)

    def use_producer(self, url: str = "", **settings: Any) -> Producer:
        """Submits go through another producer from now on, with its own way to the server."""
        self.producer = Producer(url or self.server.url, self.queue, **settings)
        self._producers.append(self.producer)
        return self.producer

    async def start(self, *names: str, flags: Sequence[str] = (), url: str = "") -> None:
        """Starts a worker process under each name, and returns once all of them serve."""
        for name in names:
            own = ["--lease-s", str(self.lease_s), "--max-batch", str(self.max_batch)]
            own += ["--step-ms", str(self._step_ms), *flags]
            log = self._folder / f"{name}.log"
            worker = SyntheticProcess(
                name, url or self.server.url, self.server.url, self.queue, log, *own
            )
            self.workers[name] = worker.start()
        for name in names:
            await asyncio.to_thread(self.workers[name].wait_serving)

    def keep(self) -> None:
        """From now on a worker that ends is started again, as by launchd."""

        async def keep() -> None:
            while True:
                for worker in self.workers.values():
                    if worker.process is not None and not worker.alive:
                        self.fault()
                        worker.kill()
                        worker.start()
                await asyncio.sleep(0.02)

        self._keeper = asyncio.create_task(keep())

    @property
    def alive(self) -> list[SyntheticProcess]:
        return [worker for worker in self.workers.values() if worker.alive]

    async def death(self, name: str = "") -> str:
        """Waits until this worker, or any, has ended by itself; that was the fault.

        Returns its name."""
        watched = [self.workers[name]] if name else list(self.workers.values())
        async with asyncio.timeout(GUARD_S):
            while True:
                for worker in watched:
                    if not worker.alive:
                        self.fault()
                        return worker.name
                await asyncio.sleep(0.005)

    def kill(self, name: str) -> None:
        self.workers[name].kill()
        self.fault()

    def fault(self) -> None:
        """The fault is now, or its cause ends now: recovery counts from here."""
        self._fault_s = asyncio.get_running_loop().time()

    async def submit(self, prompt: str = "Hi", tokens: int = 150, **fields: Any) -> Reader:
        job = await self.producer.submit(prompt=prompt, max_tokens=tokens, **fields)
        self.readers.append(Reader(self.producer, job, tokens))
        return self.readers[-1]

    def attach(self, job_id: str, tokens: int) -> Reader:
        """One more reader of a job."""
        self.readers.append(Reader(self.producer, self.producer.attach(job_id), tokens))
        return self.readers[-1]

    async def submit_many(self, number: int, tokens: int = 150) -> list[Reader]:
        """Jobs that have begun: each has a few tokens."""
        readers = [await self.submit(tokens=tokens) for _ in range(number)]
        for reader in readers:
            await reader.reach(tokens=3)
        return readers

    async def leases(self, number: float) -> None:
        await asyncio.sleep(number * self.lease_s)

    async def hash(self, job_id: str) -> dict[str, str]:
        fields: Any = await self.client.hgetall(self.keys.job(job_id))
        return {name.decode(): value.decode("utf-8", "replace") for name, value in fields.items()}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not holds():
                await asyncio.sleep(0.005)

    async def check(self, *, lost: Collection[Reader] = (), errors: bool = False) -> None:
        """What must hold after any fault, for all jobs but those the server has honestly lost.

        Each ended once, with an exact stream, also for who reads it only now; nothing is left on
        the lanes; every slot of every living worker still takes a job and gives it back; idle
        workers are idle; none has logged an exception, unless `errors` are expected.
        """
        for reader in self.readers:
            await reader.end()
        self._record_recovery()
        for reader in self.readers:
            if reader not in lost:
                reader.check_exact()
                await reader.check_stored()
        await self._check_slots()
        await self._check_lanes()
        await self.check_idle(self.alive)
        for worker in self.workers.values():
            traces = [line for line in worker.log_lines() if "exception" in line]
            assert errors or not traces, traces

    def _record_recovery(self) -> None:
        if self._fault_s is not None:
            pauses = [reader.pause_s(self._fault_s) for reader in self.readers]
            longest_s = max((pause for pause in pauses if pause is not None), default=None)
            if longest_s is not None:
                self._record("recovery_leases", round(longest_s / self.lease_s, 2))

    async def _check_slots(self) -> None:
        """No worker is up but takes nothing, and none has lost a slot."""
        slots = len(self.alive) * self.max_batch
        jobs = [await self.submit(tokens=FOREVER) for _ in range(slots)]
        for job in jobs:
            await job.reach(tokens=1)
        names = {job.worker for job in jobs}
        assert names == {worker.name for worker in self.alive}
        for job in jobs:
            assert await job.job.abort() == "aborted"
        for job in jobs:
            await job.end()
            assert isinstance(job.terminal, Done) and job.terminal.finish_reason == "aborted"
            job.check_exact()

    async def _check_lanes(self) -> None:
        for lane in LANES:
            assert await self.client.xlen(self.keys.lane(lane)) == 0
            groups: Any = await self._groups(lane)
            assert all(group["pending"] == 0 for group in groups), groups

    async def _groups(self, lane: Any) -> Any:
        if not await self.client.exists(self.keys.lane(lane)):
            return []
        groups = await self.client.xinfo_groups(self.keys.lane(lane))
        return [group for group in groups if group["name"] == GROUP.encode()]

    async def check_idle(self, workers: Sequence[SyntheticProcess]) -> None:
        """None of them spins: neither an idle worker nor one that has lost its server."""
        before = {worker.name: worker.cpu_s() for worker in workers}
        started_s = time.monotonic()
        await asyncio.sleep(IDLE_S)
        elapsed_s = time.monotonic() - started_s
        for worker in workers:
            used_s = worker.cpu_s() - before[worker.name]
            assert used_s < SPIN * elapsed_s, f"{worker.name}: {used_s:.2f} s in {elapsed_s:.2f} s"

    async def drain(self) -> None:
        """All workers leave in good order, for good."""
        await self.until(lambda: len(self.alive) == len(self.workers))
        if self._keeper is not None:
            self._keeper.cancel()
        for worker in self.alive:
            await asyncio.to_thread(worker.wait_serving)
        for worker in self.alive:
            worker.send(signal.SIGTERM)
        for worker in self.alive:
            assert await asyncio.to_thread(worker.wait) == 0
