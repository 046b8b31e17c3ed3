"""What redis-py does here by itself: the limits beside which the control plane is measured.

`python -m ops.lib.bench.plain URL BATCH STEP_S STEPS` is the publisher of `delays_ms`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.asyncio import Redis

from mlxq.protocol.events import Token, encode_event
from ops.lib.bootstrap import ROOT
from ops.lib.stack import Stack

CHANNEL = "plain"
MESSAGE = encode_event(Token(id="1-100", text=" hello", ids=[1234]))
PIPELINED = 100
FLOOD = "for i = 1, ARGV[1] do redis.call('PUBLISH', KEYS[1], ARGV[2]) end"
END = b"end"


def publish_per_s(url: str, seconds: float) -> float:
    """PUBLISH in pipelines, to nobody."""
    published, started_s = 0, time.perf_counter()
    with redis.Redis.from_url(url) as client:
        while time.perf_counter() < started_s + seconds:
            pipeline = client.pipeline(transaction=False)
            for _ in range(PIPELINED):
                pipeline.publish(CHANNEL, MESSAGE)
            published += len(pipeline.execute())
    return published / (time.perf_counter() - started_s)


async def receive_per_s(url: str, messages: int) -> float:
    """A subscriber to whom one script publishes all of it at once."""

    def flood() -> None:
        with redis.Redis.from_url(url) as client:
            client.eval(FLOOD, 1, CHANNEL, str(messages), MESSAGE)

    started_s, received = 0.0, 0
    async with Redis.from_url(url) as client, client.pubsub() as subscription:
        await subscription.subscribe(CHANNEL)
        async for message in subscription.listen():
            if message["type"] == "subscribe":
                flooding = asyncio.create_task(asyncio.to_thread(flood))
                continue
            started_s = started_s or time.perf_counter()
            received += 1
            if received == messages:
                break
        await flooding
    return received / (time.perf_counter() - started_s)


async def delays_ms(stack: Stack, *, batch: int, step_s: float, steps: int) -> list[float]:
    """From before PUBLISH in another process until it is received here, message by message."""
    command = ["-m", "ops.lib.bench.plain", stack.url, str(batch), str(step_s), str(steps)]
    delays: list[float] = []
    async with Redis.from_url(stack.url) as client, client.pubsub() as subscription:
        await subscription.subscribe(CHANNEL)
        async for message in subscription.listen():
            now_ns = time.monotonic_ns()
            if message["type"] == "subscribe":
                publisher = await asyncio.create_subprocess_exec(
                    sys.executable, *command, cwd=ROOT, start_new_session=True
                )
                stack.guard.add(publisher.pid)
            elif message["data"] == END:
                break
            else:
                delays.append((now_ns - int(message["data"])) / 1e6)
        await publisher.wait()
        stack.guard.discard(publisher.pid)
    return delays


def main(arguments: Sequence[str]) -> None:
    """Publishes the time, `BATCH` times in one pipeline every STEP_S."""
    url, batch, step_s, steps = arguments
    due_s = time.monotonic()
    with redis.Redis.from_url(url) as client:
        for _ in range(int(steps)):
            due_s += float(step_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
            pipeline: Any = client.pipeline(transaction=False)
            for _ in range(int(batch)):
                pipeline.publish(CHANNEL, time.monotonic_ns())
            pipeline.execute()
        client.publish(CHANNEL, END)


if __name__ == "__main__":
    main(sys.argv[1:])
