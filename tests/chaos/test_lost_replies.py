"""The reply to a script does not come: it ran, and the caller cannot know."""

from __future__ import annotations

import asyncio
import signal
from typing import Literal

import pytest

from mlxq.protocol.scripts import NAMES, script
from tests.chaos.conftest import Build
from tests.chaos.house import House
from tests.proxy import Proxy

OF_PRODUCERS = ("enqueue", "abort")


@pytest.mark.parametrize("how", ["cut", "silence"])
@pytest.mark.parametrize("name", NAMES)
async def test_reply_lost(name: str, how: Literal["cut", "silence"], build: Build) -> None:
    """Replies to one script are lost: two by a cut, under leases too long to help; one by silence.

    Promise: 1 2 3. Fails without: script by script, guard `dup` in enqueue.lua; `self._recover =
    True` in intake.py; guard `sequence` in emit.lua; guard `finish_once` in finish.lua; `except
    UNANSWERED` in lease.py and in sweeper.py; `Link.call`, made `call_once`, in `Bridge.release`;
    the loop in `Connections.ask` for ABORT; for silence, `ReplyTimeout` in `Link.once`.
    """
    house: House = await build(lease_s=60.0 if how == "cut" and name != "beat" else 3.0)
    for each in NAMES:
        await house.client.script_load(script(each).source)
    async with Proxy(house.server.port) as proxy:
        if name in OF_PRODUCERS:
            house.use_producer(proxy.url, socket_timeout_s=1.0)
            await house.start("one")
        else:
            await house.start("one", url=proxy.url, flags=("--drain-timeout-s", "0"))
        jobs = await house.submit_many(2, tokens=120)
        for _ in range(2 if how == "cut" else 1):
            proxy.lose_reply(script(name).sha.encode(), how)
        house.fault()
        for _ in range(2):
            await house.submit(tokens=60)
        if name == "abort":
            for job in jobs:
                assert await job.job.abort() in ("aborted", "finished")
        if name == "release":
            house.workers["one"].send(signal.SIGTERM)
            assert await asyncio.to_thread(house.workers["one"].wait) == 0
            await house.start("two")
        await house.until(lambda: proxy.pending_losses == 0)
        submitted = {reader.id for reader in house.readers}
        await house.check()
    lines = [line for line in house.workers["one"].log_lines() if line.get("job") in submitted]
    how_ended = {line["how"] for line in lines if line["event"] == "ended"}
    # Whose reply was lost does not lose the job, but for an abort by somebody else.
    assert how_ended <= {"done"} or name in ("release", "abort")
