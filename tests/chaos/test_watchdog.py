"""An engine that hangs loses its jobs; one that is only slow keeps them."""

from __future__ import annotations

import asyncio
import json

import pytest

from mlxq.worker.config import EXIT_ENGINE_DIED
from tests.chaos.conftest import Build
from tests.chaos.house import House

STALL_S = 0.8


@pytest.mark.parametrize("where", ["token:40", "prefill"])
async def test_a_hung_engine(where: str, build: Build) -> None:
    """The engine hangs in a step: its process ends by itself, its jobs go on elsewhere.

    Promise: 4. Fails without: `stalled_s > config.stall_timeout_s` in lease.py.
    """
    house: House = await build(max_batch=8)
    await house.start("one", "two", flags=("--stall-timeout-s", str(STALL_S)))
    beside = await house.submit_many(5, tokens=250)
    hung = await house.submit(f"hang@{where}/1", tokens=80)
    name = await house.death()
    assert await asyncio.to_thread(house.workers[name].wait) == EXIT_ENGINE_DIED
    lines = map(json.loads, house.workers[name].log.read_text().splitlines())
    [told] = [line for line in lines if line["event"] == "engine_hung"]
    assert told["worker"] == name and "--stall-timeout-s" in told["remedy"]
    await house.check()
    assert hung.terminal.attempts >= 2
    assert any(reader.terminal.attempts >= 2 for reader in beside)


async def test_an_engine_that_fails(build: Build) -> None:
    """The engine raises in a step: the worker gives its jobs back at once and ends.

    Promise: 4. Fails without: `on_dead` in `EngineThread._run` (thread.py).
    """
    house: House = await build(max_batch=8)
    await house.start("one", "two")
    beside = await house.submit_many(5, tokens=250)
    broken = await house.submit("raise@token:40/1", tokens=80)
    name = await house.death()
    assert await asyncio.to_thread(house.workers[name].wait) == EXIT_ENGINE_DIED
    await house.check(errors=True)
    assert broken.terminal.attempts >= 2
    assert any(reader.terminal.attempts >= 2 for reader in beside)


async def test_a_long_prefill_is_not_a_hang(build: Build) -> None:
    """A prompt takes three times the stall timeout and several leases to read.

    Promise: 4. Nobody takes it for hung, nobody else takes it. Fails without: `_progress_at` set
    after every step in `EngineThread._serve` (thread.py).
    """
    house: House = await build(lease_s=1.5)
    await house.start("one", "two", flags=("--stall-timeout-s", "1.2"))
    slow = await house.submit("prefill:900", tokens=20)
    house.fault()
    await house.check()
    assert slow.terminal.attempts == 1
