"""The scene of every chaos test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.house import House

Build = Callable[..., Any]


@pytest.fixture
async def build(
    queue: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> AsyncIterator[Build]:
    """Makes the house of a test, with the settings it needs; taken down at the end."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> House:
            return await stack.enter_async_context(
                House(queue, tmp_path, record_property, **settings)
            )

        yield make


@pytest.fixture
async def house(build: Build) -> House:
    """One with the usual settings and no worker yet."""
    made: House = await build()
    return made
