"""One subscription connection for all jobs that a producer reads."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from redis.asyncio.connection import AbstractConnection

from mlxq.producer.connections import REFUSALS, backoff_s, closed
from mlxq.protocol.errors import ServerUnreachable
from mlxq.protocol.timeouts import PARTS

log = logging.getLogger("mlxq.producer")

PING_S = 5.0
SILENCE_S = 15.0  # no message and no pong for so long: the connection is dead


class Feed:
    """Live messages of one channel on their way from the hub to one reader.

    Bounded, and never in the hub's way: what does not fit is dropped and the feed is dirty,
    which tells the reader to look into the transcript. The hub calls `acknowledge`, `refuse`,
    `offer` and `end`; the rest belongs to the one task that reads.
    """

    def __init__(self, channel: str, limit: int) -> None:
        self.channel = channel
        self._limit = limit
        self._messages: deque[bytes] = deque()
        self._dirty = False
        self._ended = False
        self._refusal = ""
        self._subscribed = asyncio.Event()
        self._news = asyncio.Event()

    def acknowledge(self) -> None:
        """The server has (again) subscribed the channel: earlier messages may be missing."""
        self._refusal = ""
        self._subscribed.set()
        self._mark_dirty()

    def refuse(self, reason: str) -> None:
        """The server does not let this user in: `subscribed` need not wait."""
        if not self._subscribed.is_set():
            self._refusal = reason
            self._subscribed.set()

    def offer(self, message: bytes) -> None:
        if self._dirty:
            return  # the look to come finds it in the transcript
        if len(self._messages) >= self._limit:
            self._mark_dirty()
            return
        self._messages.append(message)
        self._news.set()

    def end(self) -> None:
        """The hub is closed: the reader is told by an error."""
        self._ended = True
        self._subscribed.set()
        self._news.set()

    def _mark_dirty(self) -> None:
        self._messages.clear()
        self._dirty = True
        self._news.set()

    async def subscribed(self) -> None:
        """Returns once the server has acknowledged the subscription.

        Raises ServerUnreachable if the server refuses this user.
        """
        await self._subscribed.wait()
        self._check()
        if self._refusal:
            raise ServerUnreachable(f"refused by Redis: {self._refusal}")

    def take_dirty(self) -> bool:
        """Whether the transcript must be looked at; the mark is taken off."""
        self._check()
        dirty, self._dirty = self._dirty, False
        return dirty

    def pop(self) -> bytes | None:
        """The next live message, if one is here."""
        return self._messages.popleft() if self._messages else None

    async def wait(self, timeout_s: float) -> bool:
        """Waits for a message or a dirty mark; False if it stayed quiet."""
        if not self._has_news:
            self._news.clear()
            # Not asyncio.timeout: it would double what a message costs.
            alarm = asyncio.get_running_loop().call_later(timeout_s, self._news.set)
            try:
                await self._news.wait()
            finally:
                alarm.cancel()
        return self._has_news

    @property
    def _has_news(self) -> bool:
        return bool(self._messages) or self._dirty or self._ended

    def _check(self) -> None:
        if self._ended:
            raise closed()


class Hub:
    """The one subscription of a producer, rebuilt for as long as it is open.

    One task owns the connection; a part of it reads, one writes, and one ends both when the
    server has been silent for too long. Readers join and leave by naming a channel in
    `_changed`, and the writing part brings the server to what `_feeds` asks for. After any
    failure it connects again and subscribes all channels, and the new acknowledgements send
    every reader to the transcript. The keepalive channel is always subscribed, so that the
    connection is never without a subscription.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[AbstractConnection]],
        keepalive: str,
        *,
        sharded: bool,
        buffer: int,
    ) -> None:
        self._connect = connect
        self._buffer = buffer
        self._subscribe = "SSUBSCRIBE" if sharded else "SUBSCRIBE"
        self._unsubscribe = "SUNSUBSCRIBE" if sharded else "UNSUBSCRIBE"
        self._feeds: dict[str, set[Feed]] = {keepalive: set()}
        # What the server was told on this connection, and what of it has been acknowledged.
        self._subscribed: set[str] = set()
        self._acknowledged: set[str] = set()
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._heard = False
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.trouble = ""

    def join(self, channel: str) -> Feed:
        """A new feed of `channel`; it must be given to `leave` in the end."""
        if self._closed:
            raise closed()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="mlxq hub")
        feed = Feed(channel, self._buffer)
        self._feeds.setdefault(channel, set()).add(feed)
        if channel in self._acknowledged:
            feed.acknowledge()
        else:
            self._tell(channel)
        return feed

    def leave(self, feed: Feed) -> None:
        """Ends a feed; leaving twice, or after the hub has closed, does nothing."""
        feeds = self._feeds.get(feed.channel, set())
        feeds.discard(feed)
        if not feeds and self._feeds.pop(feed.channel, None) is not None:
            self._tell(feed.channel)

    def _tell(self, channel: str) -> None:
        self._changed.add(channel)
        self._wake.set()

    async def aclose(self) -> None:
        """Ends all feeds and the connection. May be called again."""
        self._closed = True
        for feeds in self._feeds.values():
            for feed in feeds:
                feed.end()
        self._feeds.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                await self._session()
            except Exception as error:
                self._note(error)
            failures = 0 if self._acknowledged else failures + 1
            self._subscribed.clear()
            self._acknowledged.clear()
            if failures <= 1:
                log.warning("subscription lost, connecting again: %s", self.trouble)
            await asyncio.sleep(backoff_s(failures))

    def _note(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.trouble = str(error) or type(error).__name__
        if isinstance(error, REFUSALS):
            for feeds in self._feeds.values():
                for feed in feeds:
                    feed.refuse(self.trouble)

    async def _session(self) -> None:
        connection = await self._connect()
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._read(connection))
                parts.create_task(self._write(connection))
                parts.create_task(self._listen_for_silence())
        finally:
            await connection.disconnect(nowait=True)

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            reply = await connection.read_response()
            self._heard = True
            match reply:
                case [b"message" | b"smessage", channel, message]:
                    for feed in self._feeds.get(channel.decode(), ()):
                        feed.offer(message)
                case [b"subscribe" | b"ssubscribe", channel, _]:
                    self._acknowledge(channel.decode())
                case _:  # a pong, or the end of a subscription
                    pass

    def _acknowledge(self, channel: str) -> None:
        if channel in self._subscribed:
            self._acknowledged.add(channel)
            for feed in self._feeds.get(channel, ()):
                feed.acknowledge()

    async def _listen_for_silence(self) -> None:
        # In parts, as in ReplyTimeout: a stalled loop has neither asked nor listened.
        silent = 0
        while silent < PARTS:
            self._heard = False
            await asyncio.sleep(SILENCE_S / PARTS)
            silent = 0 if self._heard else silent + 1
        raise TimeoutError(f"no answer for {SILENCE_S:g} seconds")

    async def _write(self, connection: AbstractConnection) -> None:
        self._changed = set(self._feeds)
        while True:
            changed, self._changed = self._changed, set()
            wanted = changed & self._feeds.keys()
            missing = wanted - self._subscribed
            surplus = (changed - wanted) & self._subscribed
            self._subscribed = (self._subscribed | missing) - surplus
            self._acknowledged -= surplus
            if missing:
                await connection.send_command(self._subscribe, *missing)
            if surplus:
                await connection.send_command(self._unsubscribe, *surplus)
            try:
                async with asyncio.timeout(PING_S):
                    await self._wake.wait()
            except TimeoutError:
                await connection.send_command("PING")
            self._wake.clear()
