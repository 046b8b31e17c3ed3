"""Readers of one job (PROTOCOL section 10) and the one subscription they share."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

import redis

from mlxq.protocol.events import EventId
from mlxq.protocol.keys import Keys
from tests.model.network import Lost
from tests.model.transcript import Stored, from_channel, read_page

if TYPE_CHECKING:
    from tests.model.world import World

PAGE = 3
QUIET_STEPS = 40  # steps without a message until a reader looks for itself
START = EventId(0, 0)


class Hub:
    """One real subscription to all channels of the queue; keeps what was published, in order."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.prefix = keys.live("").encode()
        self.pubsub = client.pubsub()  # type: ignore[no-untyped-call]
        self.pubsub.psubscribe(f"{keys.live('')}*")
        self.published: dict[str, list[Stored]] = {}
        self.inboxes: dict[str, list[deque[Stored]]] = {}
        self.pump()

    def pump(self) -> None:
        """Reads all that was published before now: the answer to a PING comes behind it."""
        self.pubsub.ping("here")
        while True:
            message = self.pubsub.get_message(timeout=5.0)
            if message is None:
                raise RuntimeError("no answer to a PING within 5 s")
            if message["type"] == "pong":
                return
            if message["type"] == "pmessage":
                self._deliver(message["channel"], message["data"])

    def _deliver(self, channel: bytes, data: bytes) -> None:
        job_id = channel.removeprefix(self.prefix).decode()
        event = from_channel(data)
        self.published.setdefault(job_id, []).append(event)
        for inbox in self.inboxes.get(job_id, ()):
            inbox.append(event)

    def join(self, job_id: str) -> deque[Stored]:
        """SUBSCRIBE with its acknowledgement: everything published from now on arrives."""
        self.pump()
        inbox: deque[Stored] = deque()
        self.inboxes.setdefault(job_id, []).append(inbox)
        return inbox

    def close(self) -> None:
        self.pubsub.close()


class Reader:
    """Follows one job from `cursor`. `delivered` is what its user has seen."""

    def __init__(self, world: World, job_id: str, cursor: EventId = START) -> None:
        self.world = world
        self.job_id = job_id
        self.name = f"reader-{job_id}"
        self.cursor = self.last = cursor
        self.delivered: list[Stored] = []
        self.inbox: deque[Stored] | None = None
        self.dirty = True
        self.head: tuple[bytes | None, int] | None = None  # state and seq, while reading pages
        self.found = False  # an event since the head was read
        self.quiet = 0
        self.done = False

    def step(self) -> bool:
        """One message, one page or one look at the head; False if nothing is there."""
        if self.done:
            return False
        if self.inbox is None:
            self.inbox = self.world.hub.join(self.job_id)
            return True
        self.world.pump()
        if self._disturbed(self.inbox):
            return True
        try:
            if self.head is not None:
                self._page(self.head)
            elif self.dirty:
                self._look()
            else:
                return self._message(self.inbox)
        except Lost:
            self.head, self.dirty = None, True
        return True

    def _disturbed(self, inbox: deque[Stored]) -> bool:
        world = self.world
        if world.chance("reader_cut"):
            # Messages are missed until the new subscription is acknowledged.
            world.hub.inboxes[self.job_id] = [
                other for other in world.hub.inboxes[self.job_id] if other is not inbox
            ]
            self.inbox, self.head, self.dirty = None, None, True
            return True
        if world.chance("reader_drop") and inbox:
            inbox.popleft()
        if world.chance("reader_twice") and inbox:
            inbox.append(inbox[0])
        if world.chance("reader_restart") and self.delivered:
            older = world.rng.choice([START, *(event.id for event in self.delivered)])
            world.readers.append(Reader(world, self.job_id, older))
        return False

    def _look(self) -> None:
        self.dirty = False
        key = self.world.keys.job(self.job_id)
        state, seq = self.world.net.read(self.name, lambda client: _head(client, key))
        self.head, self.found = (state, seq), False

    def _page(self, head: tuple[bytes | None, int]) -> None:
        key, after = self.world.keys.events(self.job_id), str(self.last)
        page = self.world.net.read(self.name, lambda client: read_page(client, key, after, PAGE))
        for event in page:
            self.found = True
            self._apply(event)
            if self.dirty and event.id.seq > self.last.seq:
                # Not missed by us but missing: nobody can follow this job any further.
                tampered = self.job_id in self.world.tampered
                self.world.check(tampered, f"{self.name} at {self.last} finds {page} stored")
                self.done = True
            if self.done:
                return
        if not page:
            self.head = None
            if not self.found:
                self._nothing_new(*head)

    def _nothing_new(self, state: bytes | None, seq: int) -> None:
        if state is None:
            return  # not submitted yet: wait
        what = f"{self.name} at {self.last}: state {state!r}, seq {seq}"
        self.world.check(seq == self.last.seq, f"the transcript has another end for {what}")
        self.done = state in (b"done", b"failed")

    def _message(self, inbox: deque[Stored]) -> bool:
        if inbox:
            self.quiet = 0
            self._apply(inbox.popleft())
            return True
        self.quiet += 1
        if self.quiet >= QUIET_STEPS:
            self.quiet, self.dirty = 0, True
        return False

    def _apply(self, event: Stored) -> None:
        attempt, seq = event.id
        if seq <= self.last.seq:
            rewritten = attempt > self.last.attempt
            self.world.check(not rewritten, f"{self.name} at {self.last} read {event}")
        elif seq == self.last.seq + 1 and attempt >= self.last.attempt:
            self.delivered.append(event)
            self.last = event.id
            self.done = event.terminal
        else:
            self.dirty = True


def _head(client: redis.Redis, key: str) -> tuple[bytes | None, int]:
    state, seq = cast("list[bytes | None]", client.hmget(key, "state", "seq"))
    return state, int(seq or 0)
