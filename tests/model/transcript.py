"""Events as read back from a transcript or a channel."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import redis

from mlxq.protocol.events import EventId


class Stored(NamedTuple):
    """One event: its id and its JSON without the id."""

    id: EventId
    json: bytes

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.json)
        return body

    @property
    def terminal(self) -> bool:
        return self.body["type"] in ("done", "failed")


def read_page(client: redis.Redis, key: str, after: str, count: int | None) -> list[Stored]:
    """Up to `count` events after the id `after`; all of them for None."""
    entries: list[tuple[bytes, dict[bytes, bytes]]]
    entries = client.xrange(key, f"({after}", "+", count=count)  # type: ignore[assignment]
    return [Stored(EventId.parse(entry_id), fields[b"e"]) for entry_id, fields in entries]


def from_channel(message: bytes) -> Stored:
    """Takes the `"id":"attempt-seq",` out that the scripts put in first."""
    head, quote, rest = message.removeprefix(b'{"id":"').partition(b'",')
    if not quote or not message.startswith(b'{"id":"'):
        raise ValueError(f"no id in {message!r}")
    return Stored(EventId.parse(head), b"{" + rest)


def token_ids(events: list[Stored]) -> list[int]:
    return [token for event in events for token in event.body.get("ids", [])]


def token_text(events: list[Stored]) -> str:
    return "".join(event.body.get("text", "") for event in events)
