"""How much memory processes and servers use, and whether that is within bounds."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

MIB = 2**20
_LOOK_S = 0.1


def rss_bytes(pid: int) -> int:
    """Physical memory of a process."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True, text=True
    )
    return int(shown.stdout) * 1024


async def used_bytes(client: Redis) -> int:
    """Memory that the server has given out: data and the buffers of its clients."""
    info: Any = await client.info("memory")
    return int(info["used_memory"])


class Held:
    """What this process has taken from Python since a block began: for a process whose physical
    memory tells nothing, because other tests have left it large."""

    def __init__(self) -> None:
        gc.collect()
        self._before = tracemalloc.get_traced_memory()[0]

    def now(self) -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - self._before

    def peak(self) -> int:
        return tracemalloc.get_traced_memory()[1] - self._before


@contextmanager
def held_bytes() -> Iterator[Held]:
    tracemalloc.start()
    try:
        yield Held()
    finally:
        tracemalloc.stop()


class Peak:
    """The most that was seen."""

    value = 0


@asynccontextmanager
async def peak_used_bytes(client: Redis) -> AsyncIterator[Peak]:
    """Watches a server's memory until the block ends."""
    peak = Peak()

    async def watch() -> None:
        while True:
            peak.value = max(peak.value, await used_bytes(client))
            await asyncio.sleep(_LOOK_S)

    watching = asyncio.create_task(watch())
    try:
        yield peak
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    peak.value = max(peak.value, await used_bytes(client))


def check(what: str, measured: float, most: float) -> None:
    """Prints a measured number of bytes, and asserts its bound."""
    print(f"\n{what}: {measured:,.0f} bytes, at most {most:,.0f}")
    assert measured <= most, f"{what}: {measured:,.0f} bytes, and at most {most:,.0f} are right"
