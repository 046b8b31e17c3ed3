"""The connections of a producer: a bounded pool for commands, one apart for the subscription."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from mlxq.protocol.errors import MlxqError, ServerUnreachable
from mlxq.protocol.servers import connection_options, is_misplaced
from mlxq.protocol.timeouts import ReplyTimeout

T = TypeVar("T")

log = logging.getLogger("mlxq.producer")

# Refusals of this user, which no repetition changes. A failing server is not among them.
REFUSALS = (AuthenticationError, NoPermissionError)
BACKOFF_MAX_S = 2.0


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling, bounded, with jitter."""
    longest_s = min(BACKOFF_MAX_S, 0.05 * 2.0 ** min(failures, 16))
    return random.uniform(longest_s / 2, longest_s)


class Connections:
    """Commands to the server of `key`, each repeated until it is answered (PROTOCOL section 6).

    redis-py's own retries are off: it would send again what may have run already. Used by any
    task of one event loop. After `aclose` nothing connects any more. Raises ValueError for a
    bad URL; see protocol/servers.py.
    """

    def __init__(
        self, url: str, key: str, *, max_connections: int, socket_timeout_s: float
    ) -> None:
        options = {
            "max_connections": max_connections,
            "socket_timeout": socket_timeout_s,
            **connection_options(url, key),
            # RESP2: subscriptions then read as plain lists, and no handshake is needed.
            "protocol": 2,
            "decode_responses": False,
            "health_check_interval": 0,
            "retry": Retry(NoBackoff(), 0),
        }
        # Timed out here instead: redis-py would use asyncio.wait_for, which on Python 3.11 may
        # swallow the cancellation of a task that is just sending, and count a stall of the loop.
        self._reply_s = options.pop("socket_timeout")
        options |= {"socket_timeout": None, "socket_connect_timeout": None}
        self._pool = ConnectionPool(**options)
        self._client = Redis.from_pool(self._pool)
        # Each action uses one connection at a time. Waited for here, not in the pool: the wait
        # must not count as the server's.
        self._free = asyncio.Semaphore(self._pool.max_connections)
        self._asking: set[ReplyTimeout] = set()
        self._nobody_asks = asyncio.Event()
        self._closed = False
        self._down = False

    async def ask(
        self, action: Callable[[Redis], Awaitable[T]], *, allowed_s: float | None = None
    ) -> T:
        """The answer of `action`, repeated with jittered back-off for `allowed_s`, or for ever.

        `action` must bear to run more than once. Raises ServerUnreachable when time is up or
        the server refuses this user, MlxqError when the producer is closed meanwhile or a key
        holds what mlxq never puts there.
        """
        now = asyncio.get_running_loop().time
        deadline = None if allowed_s is None else now() + allowed_s
        failures = 0
        trouble = ""
        while not self._closed:
            try:
                answer = await self._try(action, deadline)
                self._down = False
                return answer
            except REFUSALS as error:
                raise ServerUnreachable(f"refused by Redis: {error}") from None
            except (RedisError, OSError) as error:
                trouble = str(error) or trouble or "timeout"
                if "WRONGTYPE" in trouble:
                    raise MlxqError(f"a key of the queue is damaged: {trouble}") from None
                if is_misplaced(error):
                    await self._pool.disconnect(inuse_connections=False)
            failures += 1
            wait_s = backoff_s(failures)
            if deadline is not None and now() + wait_s >= deadline:
                raise ServerUnreachable(f"no answer from Redis in the time allowed: {trouble}")
            if not self._down:
                self._down = True
                log.warning("no answer from Redis, trying again: %s", trouble)
            await asyncio.sleep(wait_s)
        raise closed()

    async def _try(self, action: Callable[[Redis], Awaitable[T]], deadline: float | None) -> T:
        now = asyncio.get_running_loop().time
        allowed = ReplyTimeout(None if deadline is None else deadline - now())
        self._asking.add(allowed)
        try:
            async with allowed, self._free, ReplyTimeout(self._reply_s):
                return await action(self._client)
        finally:
            self._asking.remove(allowed)
            if not self._asking:
                self._nobody_asks.set()

    async def subscription(self) -> AbstractConnection:
        """A new connection apart from the pool. It has no timeout of its own."""
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            async with ReplyTimeout(self._reply_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def aclose(self) -> None:
        """Ends all commands under way and closes the connections. May be called again."""
        self._closed = True
        for allowed in self._asking:
            allowed.expire()
        if self._asking:
            self._nobody_asks.clear()
            await self._nobody_asks.wait()
        with suppress(RedisError, OSError):
            await self._client.aclose()


def closed() -> MlxqError:
    return MlxqError("the producer is closed")
