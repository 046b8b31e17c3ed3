"""The reply to a script does not come: it ran, and the caller cannot know."""

from __future__ import annotations

import asyncio
import signal

import pytest

from mlxq.protocol.scripts import NAMES, script
from tests.chaos.house import House
from tests.proxy import Proxy

OF_PRODUCERS = ("enqueue", "abort")


@pytest.mark.parametrize("name", NAMES)
async def test_reply_lost(name: str, house: House) -> None:
    """Three replies to one script are lost: two by a cut, one by silence.

    Promise: 1 2 3. Fails without: `dup` in enqueue.lua; `self._recover = True` in intake.py;
    `if seq <= job.seq` in emit.lua; REPEATED in finish.lua; `Link.call`, replaced by `call_once`
    in `Bridge.release`; `except UNANSWERED` in lease.py and sweeper.py; the repetition in
    `Connections.ask` for ABORT.
    """
    for each in NAMES:
        await house.client.script_load(script(each).source)
    sha = script(name).sha.encode()
    async with Proxy(house.server.port) as proxy:
        if name in OF_PRODUCERS:
            house.use_producer(proxy.url, socket_timeout_s=house.lease_s)
            await house.start("one", "two")
        else:
            await house.start("one", "two", url=proxy.url, flags=("--drain-timeout-s", "0"))
        jobs = await house.submit_many(3, tokens=150)
        for how in ("cut", "cut", "silence"):
            proxy.lose_reply(sha, how)
        house.fault()
        for _ in range(3):
            await house.submit(tokens=80)
        if name == "abort":
            for job in jobs:
                assert await job.job.abort() in ("aborted", "finished")
        if name == "release":
            house.workers["one"].send(signal.SIGTERM)
            assert await asyncio.to_thread(house.workers["one"].wait) == 0
        await house.until(lambda: proxy.pending_losses == 0)
        await house.check()
