"""What a model, a worker or an error says cannot give orders to the terminal that shows it."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from mlxq.producer import Producer
from mlxq.producer.commands import app
from mlxq.protocol.keys import Keys
from tests.producer.hand import HandWorker
from tests.server import Server

pytestmark = pytest.mark.any_server

MAIN = "import sys; from mlxq.producer.cli import main; sys.exit(main())"
ORDER = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\r"


def read_all(descriptor: int) -> str:
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(descriptor, 65_536)
        except OSError:  # the other end of a terminal has closed
            part = b""
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def followed(server: Server, queue: str, *flags: str) -> str:
    """What `mlxq follow a` shows on a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", MAIN, "follow", "a", "--queue", queue, *flags]
    environment = {**os.environ, "MLXQ_REDIS_URL": server.url}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = read_all(ours)
        process.wait(60)
    os.close(ours)
    return shown


async def test_text_of_a_model(server: Server, queue: str, hand: HandWorker) -> None:
    async with Producer(server.url, queue) as producer:
        await producer.submit(prompt="a", job_id="a")
        held = await hand.take()
        await held.start()
        await held.finish("before", ORDER, "after")
    for flags in ((), ("--json",)):
        shown = await asyncio.to_thread(followed, server, queue, *flags)
        assert "before" in shown and "after" in shown
        assert not any(char in shown for char in "\x1b\x07\x9b")
    piped = await asyncio.to_thread(
        CliRunner().invoke, app, ["follow", "a", "--queue", queue, "--redis", server.url]
    )
    assert ORDER in piped.output  # what is no terminal gets the text as it is


async def test_names_in_the_tables(server: Server, queue: str, client: Redis, keys: Keys) -> None:
    told = {"model": f"[/red]{ORDER}", "host": ORDER, "version": "[bold]", "slots": "many"}
    for field, value in told.items():
        await client.hset(keys.worker(f"mac.{ORDER}"), field, value)
    await client.zadd(keys.workers, {f"mac.{ORDER}": 1})
    await client.xadd(keys.dead, {"id": "[/b]", "owner": ORDER, "crashes": "x", "reason": ORDER})
    for command in (["status"], ["dead", "list"]):
        words = [*command, "--queue", queue, "--redis", server.url]
        shown = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert shown.exit_code == 0, shown.output
        assert "[/" in shown.output
        assert not any(char in shown.output for char in "\x1b\x07\x9b")
    async with Producer(server.url, queue) as producer:
        assert [worker.model for worker in (await producer.status()).workers] == [told["model"]]
