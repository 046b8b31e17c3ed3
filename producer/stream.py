"""The events of one job in order, each exactly once, however the connection fares."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from mlxq.producer.connections import Connections
from mlxq.producer.hub import Feed
from mlxq.protocol.errors import (
    BadCursor,
    HistoryRewritten,
    ReadError,
    TranscriptExpired,
    UnknownJob,
)
from mlxq.protocol.events import Done, Event, EventId, Failed, Unknown, decode_event
from mlxq.protocol.keys import Keys

START = EventId(0, 0)
PAGE = 1_000
QUIET_MIN_S = 2.0
QUIET_MAX_S = 15.0
TERMINAL = (b"done", b"failed")


class Look(NamedTuple):
    """What one look at the server shows: the job hash, and a page of the transcript."""

    state: bytes | None
    attempt: int
    seq: int
    page: list[tuple[bytes, dict[bytes, bytes]]]


class Stream:
    """One reader of one job: the transcript, then the channel, and a cursor between them.

    This is PROTOCOL section 10. A first, a late and a reconnecting reader are the same: what
    the feed may have missed is read from the transcript, what both show is dropped by its id.
    Used by one task.
    """

    def __init__(
        self, job_id: str, keys: Keys, connections: Connections, feed: Feed, after: EventId
    ) -> None:
        self._job_id = job_id
        self._keys = keys
        self._connections = connections
        self._feed = feed
        self._last = after
        self._after = after
        self._unread = False
        self._quiet_s = QUIET_MIN_S
        self.ended = False

    async def next(self) -> list[Event]:
        """Waits for news and returns what is new, in order; may be empty.

        Raises UnknownJob, or a ReadError.
        """
        if self._unread or self._feed.take_dirty():
            return await self._look()
        message = self._feed.pop()
        if message is not None:
            self._quiet_s = QUIET_MIN_S
            return self._from_channel(message)
        if not await self._feed.wait(self._quiet_s):
            # The end of the job, too, may be a message that was lost.
            self._quiet_s = min(2 * self._quiet_s, QUIET_MAX_S)
            return await self._look()
        return []

    def _from_channel(self, message: bytes) -> list[Event]:
        try:
            event = decode_event(message)
            event_id = EventId.parse(event.id)
        except (msgspec.MsgspecError, BadCursor):
            self._unread = True  # not an event; the transcript decides
            return []
        if self._is_next(event_id):
            return self._deliver(event_id, event)
        self._unread = event_id.seq > self._last.seq
        return []

    async def _look(self) -> list[Event]:
        look = await self._connections.ask(self._read_server)
        self._unread = len(look.page) == PAGE
        if not look.page:
            self._judge(look)
        events: list[Event] = []
        for entry_id, fields in look.page:
            event_id = EventId.parse(entry_id)
            if self._is_next(event_id):
                events += self._deliver(event_id, self._decode(event_id, fields))
            elif event_id.seq > self._last.seq:
                raise TranscriptExpired(f"{self._job_id}: no event behind {self._last} is left")
        return events

    async def _read_server(self, client: Redis) -> Look:
        # The hash first: what it counts is then in the page, or gone.
        pipeline = client.pipeline(transaction=False)
        pipeline.hmget(self._keys.job(self._job_id), ["state", "attempt", "seq"])
        pipeline.xrange(self._keys.events(self._job_id), f"({self._last}", "+", PAGE)
        (state, attempt, seq), page = await pipeline.execute()
        return Look(state, self._count(attempt), self._count(seq), page)

    def _count(self, value: bytes | None) -> int:
        if value is not None and not (value.isdigit() and len(value) < 20):
            raise ReadError(f"{self._job_id}: the job's hash is damaged")
        return int(value or 0)

    def _judge(self, look: Look) -> None:
        """Nothing is behind the cursor: is the job unknown, at its end, expired or waiting?"""
        if look.state is None:
            raise UnknownJob(f"no job {self._job_id} is known")
        if look.seq < self._last.seq or look.attempt < self._last.attempt:
            if self._last != self._after:
                raise self._rewritten(EventId(look.attempt, look.seq))
            raise BadCursor(f"{self._job_id}: cursor {self._last} is ahead of the job")
        if look.seq > self._last.seq:
            raise TranscriptExpired(f"{self._job_id}: the events behind {self._last} are gone")
        self.ended = look.state in TERMINAL

    def _is_next(self, event_id: EventId) -> bool:
        if event_id.seq <= self._last.seq:
            if event_id.attempt > self._last.attempt:
                raise self._rewritten(event_id)
            return False
        return event_id.seq == self._last.seq + 1 and event_id.attempt >= self._last.attempt

    def _rewritten(self, found: EventId) -> HistoryRewritten:
        return HistoryRewritten(
            f"{self._job_id}: {self._last} was delivered, and now the server is at {found}"
        )

    def _decode(self, event_id: EventId, fields: dict[bytes, bytes]) -> Event | Unknown:
        try:
            return decode_event(fields[b"e"], str(event_id))
        except (KeyError, msgspec.MsgspecError) as error:
            raise ReadError(f"{self._job_id}: event {event_id} is damaged: {error}") from None

    def _deliver(self, event_id: EventId, event: Event | Unknown) -> list[Event]:
        self._last = event_id
        if isinstance(event, Unknown):
            return []
        self.ended = isinstance(event, Done | Failed)
        return [event]
