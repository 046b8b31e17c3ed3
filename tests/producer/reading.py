"""What the tests read from jobs, and what must hold of every complete reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TypeVar

from mlxq.producer import Done, Event, EventId, Failed, Token

T = TypeVar("T")


async def collect(source: AsyncIterable[T]) -> list[T]:
    return [each async for each in source]


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


def check_complete(events: list[Event], *, after: int = 0) -> None:
    """Every event exactly once, in order, from `after` to the one terminal event."""
    ids = [EventId.parse(event.id) for event in events]
    assert [each.seq for each in ids] == list(range(after + 1, after + 1 + len(ids)))
    assert ids == sorted(ids)
    terminals = [event for event in events if isinstance(event, Done | Failed)]
    assert terminals == events[-1:]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another task brings about."""
    while not condition():
        await asyncio.sleep(0.01)
