"""All that stands from the first round to the last: server, lines, fleet, producers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mlxq.producer import Producer
from mlxq.protocol.keys import Keys, shard_names, shard_of
from ops.lib.server import Server
from ops.lib.soak.fleet import Member
from ops.lib.soak.line import Line
from ops.lib.soak.news import News
from ops.lib.soak.plan import Shape
from ops.lib.stack import Guard

T = TypeVar("T")

QUEUE = "soak"
KEPT_S = 900.0  # retention and replay: longer than a round, so that the check finds all
STEP_MS = 15
SERVER_OPTIONS = (
    *("--appendonly", "yes", "--appendfsync", "always"),
    *("--client-output-buffer-limit", "pubsub 512kb 128kb 2"),
)


class World:
    """Owned by one event loop; made by `standing`.

    client      a connection of the soak's own, past all lines; no fault reaches it but the server's
    lines       of the workers first, then of the producers
    """

    def __init__(
        self, server: Server, shape: Shape, folder: Path, guard: Guard, shards: int = 1
    ) -> None:
        self.server = server
        self.shape = shape
        self.folder = folder
        self.guard = guard
        self.news = News()
        self.shards = [Keys(name) for name in shard_names(QUEUE, shards)]
        self.client = Redis.from_url(
            server.url, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, protocol=2
        )
        self.members: list[Member] = []
        self.lines: list[Line] = []
        self.producers: list[Producer] = []

    def keys_of(self, job_id: str) -> Keys:
        """The keys of the shard that the job is in."""
        return self.shards[shard_of(job_id, len(self.shards))]

    async def insist(self, request: Callable[[], Awaitable[T]]) -> T:
        """The soak's own requests, repeated until the server answers."""
        while True:
            try:
                return await request()
            except (RedisError, OSError):
                await asyncio.sleep(0.05)

    async def open(self, workers: int) -> None:
        for index in range(workers):
            line = await self._line()
            log = self.folder / f"w{index + 1}.log"
            flags = ["--queue", QUEUE, "--shards", str(len(self.shards))]
            flags += ["--lease-s", str(self.shape.lease_s)]
            flags += ["--step-ms", str(STEP_MS), "--log-level", "info"]
            member = Member(f"w{index + 1}", line, log, self.news, self.guard, *flags)
            self.members.append(member)
        for index in range(self.shape.producers):
            line = await self._line()
            self.producers.append(
                Producer(
                    line.url,
                    QUEUE,
                    shards=len(self.shards),
                    retention_s=KEPT_S,
                    replay_s=KEPT_S,
                    # The first gives up soon: some of its submits end unanswered.
                    submit_timeout_s=1.0 if index == 0 else 60.0,
                    socket_timeout_s=1.0,
                    # The second holds little: its slow readers fall back to the transcript.
                    buffer=16 if index == 1 else 1_024,
                )
            )

    async def _line(self) -> Line:
        line = await Line(self.server.port).start()
        self.lines.append(line)
        return line

    async def restart_server(self, away_s: float) -> None:
        """A crash of the server, and a start from its append-only file."""
        self._forget_server()
        await asyncio.to_thread(self.server.kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(self.server.start, 60.0)
        self.guard.add(self.server_pid)

    @property
    def server_pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    def _forget_server(self) -> None:
        self.guard.discard(self.server_pid)

    async def close(self) -> None:
        for producer in self.producers:
            await producer.aclose()
        for line in self.lines:
            await line.close()
        await self.client.aclose()

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.insist(lambda: self.client.info())
        return found


@contextlib.asynccontextmanager
async def standing(path: str, shape: Shape, workers: int, shards: int) -> AsyncIterator[World]:
    """A server of the binary `path`, a fleet and producers. All of it ends with the block."""
    server = Server(*SERVER_OPTIONS, path=path)
    folder = Path(tempfile.mkdtemp(prefix="mlxq-soak-"))
    guard = Guard()
    world = None
    try:
        server.start()
        guard.add(server.process.pid)  # type: ignore[union-attr]
        world = World(server, shape, folder, guard, shards)
        await world.open(workers)
        async with asyncio.TaskGroup() as tasks:
            for member in world.members:
                tasks.create_task(member.run())
            try:
                yield world
            finally:
                for member in world.members:
                    member.close()
    finally:
        if world is not None:
            await world.close()
        server.stop()
        guard.close()
        shutil.rmtree(folder, ignore_errors=True)
