"""The worker's way to Redis from the loop: one pool, no hidden retries, own repetition."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool, Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mlxq.protocol.scripts import Call, run
from mlxq.protocol.servers import connection_options, is_misplaced
from mlxq.protocol.timeouts import ReplyTimeout
from mlxq.worker.clock import now_s
from mlxq.worker.trouble import describe, tls_hint

T = TypeVar("T")

WARN_INTERVAL_S = 10.0  # an outage is told of when it begins, and again while it lasts

# What leaves it open whether a request ran: a cut, a timeout or an error reply of any kind.
UNANSWERED = (RedisError, OSError, TimeoutError)

_log = structlog.get_logger()


class Packing:
    """A connection that packs its commands in C: a third off what an event costs the worker.

    redis-py does so itself where it blocks, but its asyncio connections pack in Python.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        name, *rest = args  # names such as SCRIPT LOAD are two words on the wire
        words = name.split() if isinstance(name, bytes) else name.encode().split()
        return [pack_command((*words, *rest))]


def connect(url: str, key: str) -> AsyncRedis:
    """A client for the server of `key`, in any deployment that `protocol.servers` knows.

    It never repeats a command by itself and has no timeout: put `ReplyTimeout` around what it is
    asked. redis-py's own would use asyncio.wait_for, which on Python 3.11 may swallow the
    cancellation of a task that is just sending, and take a stall of the loop for silence.
    """
    options = connection_options(url, key)
    kind = options.get("connection_class", Connection)
    options |= {
        "connection_class": type(f"Packing{kind.__name__}", (Packing, kind), {}),
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": None,
    }
    return AsyncRedis.from_pool(ConnectionPool(max_connections=8, **options))


class Backoff:
    """Pauses with full jitter that grow from 50 ms to 2 s; `reset` after a success."""

    def __init__(self) -> None:
        self._ceiling_s = 0.05

    def reset(self) -> None:
        self._ceiling_s = 0.05

    async def pause(self) -> None:
        await asyncio.sleep(random.uniform(0.02, self._ceiling_s))
        self._ceiling_s = min(2.0, self._ceiling_s * 2)


class Link:
    """Runs calls and keeps the time of the present outage. Loop thread only.

    down    whether the latest call went unanswered
    """

    def __init__(
        self, url: str, key: str, *, timeout_s: float, on_back: Callable[[float], None]
    ) -> None:
        """`on_back` is told how many seconds the server of `key` was away, once it answers."""
        self.client = connect(url, key)
        self._timeout_s = timeout_s
        self._on_back = on_back
        self._tls = url.startswith("rediss")
        self._ever_answered = False
        self._answered_s = now_s()
        self._warn_from_s = 0.0
        self._warned = False
        self.down = False

    async def once(self, request: Callable[[], Awaitable[T]]) -> T:
        """Runs a request once. Raises one of UNANSWERED if no answer came."""
        try:
            async with ReplyTimeout(self._timeout_s):
                answer = await request()
        except UNANSWERED as error:
            await self.lost(error)
            raise
        self.answered()
        return answer

    async def insist(self, request: Callable[[], Awaitable[T]]) -> T:
        """Runs a request that may be repeated, until it is answered, however long that takes."""
        backoff = Backoff()
        while True:
            try:
                return await self.once(request)
            except UNANSWERED:
                await backoff.pause()

    async def call_once(self, call: Call[T]) -> T:
        return await self.once(lambda: run(self.client, call))

    async def call(self, call: Call[T]) -> T:
        """Runs a script call, repeated byte for byte until it is answered."""
        return await self.insist(lambda: run(self.client, call))

    async def lost(self, error: BaseException) -> None:
        """Notes that a request went unanswered. After a move the server is looked up anew."""
        if is_misplaced(error):
            await self.client.connection_pool.disconnect()
        self.down = True
        asked_s = now_s()
        if asked_s >= self._warn_from_s:
            self._warned, self._warn_from_s = True, asked_s + WARN_INTERVAL_S
            down_s = round(asked_s - self._answered_s, 1)
            hint = "" if self._ever_answered else tls_hint(error, tls=self._tls)
            _log.warning("redis_lost", error=describe(error) + hint, down_s=down_s)

    def answered(self) -> None:
        """Notes that the server answers."""
        down_s, self._answered_s = now_s() - self._answered_s, now_s()
        self._ever_answered = True
        if self.down:
            self.down = False
            if self._warned:
                _log.info("redis_back", down_s=round(down_s, 3))
            self._warned = False
            self._on_back(down_s)

    async def close(self) -> None:
        await self.client.aclose()


def decoded(value: Any) -> str:
    """A reply's bytes as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
