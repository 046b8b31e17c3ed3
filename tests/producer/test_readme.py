"""The Python of README.md, run as it stands but for the server, and its tables."""

from __future__ import annotations

import asyncio
import builtins
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any, get_args

from mlxq import producer as library
from mlxq.producer import Event, Producer
from tests.producer.hand import HandWorker
from tests.server import Server

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ANSWER = "The capital of France is Paris."


def example(word: str, server: Server, queue: str) -> str:
    """The one Python block that holds `word`, for this server and queue."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if word in block]
    assert code.count('"redis://localhost:6379"') == 1
    return str(code.replace('"redis://localhost:6379"', f'"{server.url}", "{queue}"'))


def table(head: str) -> list[list[str]]:
    """The cells of the table whose first column is headed `head`."""
    [rows] = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)", cell)


async def test_submit_and_stream(server: Server, queue: str, worker: HandWorker) -> None:
    code = example("submit(", server, queue)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    hand = await worker.take()
    await hand.start()
    await hand.say("The capital")
    await hand.finish(ANSWER.removeprefix("The capital"))
    out, _ = await process.communicate()
    assert process.returncode == 0
    text, closing = out.decode().splitlines()
    assert text == ANSWER
    assert re.fullmatch(r"stop, Usage\(.*\), attempts 1", closing)


async def test_server_sent_events(
    server: Server, queue: str, producer: Producer, worker: HandWorker
) -> None:
    await producer.submit(prompt="a", job_id="hi")
    hand = await worker.take()
    await hand.start()
    await hand.say("one ", "two ")
    await hand.finish("three")
    module: dict[str, Any] = {}
    exec(example("event-stream", server, queue), module)
    app = module["app"]
    async with app.router.lifespan_context(app):
        whole = await get(app, "/jobs/hi")
        rest = await get(app, "/jobs/hi", after="1-2")
        for path, after in (("/jobs/nobody", None), ("/jobs/hi", "xx"), ("/jobs/a b", None)):
            [(what, why)] = await get(app, path, after)
            assert what == "lost" and why and "\n" not in why
    assert [event_id for event_id, _ in whole] == ["1-1", "1-2", "1-3", "1-4", "1-5"]
    assert [event["type"] for _, event in whole] == ["started", "token", "token", "token", "done"]
    assert "".join(event.get("text", "") for _, event in whole) == "one two three"
    assert rest == whole[2:]


async def get(app: Any, path: str, after: str | None = None) -> list[tuple[str, Any]]:
    """What an EventSource receives: id and data of each event."""
    headers = [(b"last-event-id", after.encode())] if after else []
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": headers}
    scope |= {"query_string": b"", "asgi": {"version": "3.0", "spec_version": "2.4"}}
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
    body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    if body.startswith("event: lost\ndata: ") and body.endswith("\n\n"):
        return [("lost", body.removeprefix("event: lost\ndata: ").strip())]
    found = re.findall(r"id: (.*)\ndata: (.*)\n\n", body)
    assert body == "".join(f"id: {name}\ndata: {data}\n\n" for name, data in found)
    return [(name, json.loads(data)) for name, data in found]


def test_the_table_of_events() -> None:
    told = {names(kind)[0]: names(fields) for kind, fields, _ in table("event")}
    kinds = {kind.__name__: set(kind.__struct_fields__) - {"id"} for kind in get_args(Event)}
    assert {kind: set(fields) for kind, fields in told.items()} == kinds


def test_the_table_of_errors() -> None:
    for errors, *_ in table("error"):
        for error in names(errors):
            kind = getattr(library, error, None) or getattr(builtins, error)
            assert issubclass(kind, Exception)
