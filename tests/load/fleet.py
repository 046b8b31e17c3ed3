"""Many synthetic workers in one process: `python -m tests.load.fleet URL QUEUE`.

One loop serves them, each with an engine thread and connections of its own. A process for each
would cost half a second of CPU; the readers' process would have its memory mixed with theirs.
SIGTERM drains them all; the exit code says whether each of them did.
"""

from __future__ import annotations

import asyncio
import os
import sys

import structlog

from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import EXIT_DRAINED, Config
from mlxq.worker.log import configure
from mlxq.worker.orders import Order, Orders
from mlxq.worker.service import serve
from ops.lib.fault import Faults
from ops.lib.synthetic import SyntheticBatch, Vocabulary
from tests.load.memory import rss_bytes

WORKERS = 50
SLOTS = 4
STEP_S = 0.5  # readers, server and fleet may share one slow core


async def run(url: str, queue: str) -> bool:
    tokenizer = Tokenizer(Vocabulary())
    faults = Faults()
    faults.install()
    orders = [Orders() for _ in range(WORKERS)]

    def load() -> SyntheticBatch:
        return SyntheticBatch(faults, max_batch=SLOTS, step_s=STEP_S, prefill_step=512)

    async def work(number: int) -> int:
        config = Config("synthetic", url, queue, name=f"mac{number}", max_batch=SLOTS)
        return await serve(config, load, orders[number], lambda path: tokenizer)

    working = asyncio.gather(*(work(number) for number in range(WORKERS)))
    told = Orders()
    with told.listening():
        await told.above(Order.SERVE)
        for order in orders:
            order.give(Order.DRAIN)
        return await working == [EXIT_DRAINED] * WORKERS


if __name__ == "__main__":
    configure("warning")
    structlog.get_logger().warning("begun", rss_bytes=rss_bytes(os.getpid()))
    sys.exit(0 if asyncio.run(run(*sys.argv[1:])) else 1)
