"""`mlxq dead`: look at the jobs that were given up, give them another try, or drop them."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from mlxq.producer.dead import DeadJob
from mlxq.producer.options import (
    DEFAULT_URL,
    JobId,
    Queue,
    RedisUrl,
    Shards,
    console,
    harmless,
    open_producer,
    run,
)
from mlxq.producer.status_view import cell

app = typer.Typer(help="Jobs that were given up.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line per job.")]


@app.command("list")
def list_dead(
    as_json: AsJson = False,
    url: RedisUrl = DEFAULT_URL,
    queue: Queue = "default",
    shards: Shards = 1,
) -> None:
    """List the dead letters, the oldest first."""

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            jobs = await producer.dead.all()
        if as_json:
            for job in jobs:
                print(msgspec.json.encode(_readable(job)).decode())
            return 0
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("job", "died (UTC)", "crashes", "last worker", "reason"):
            table.add_column(column)
        for job in jobs:
            died = datetime.fromtimestamp(job.died_ms / 1000, UTC)
            cells = (job.id, f"{died:%F %T}", str(job.crashes), job.owner, job.reason)
            table.add_row(*map(cell, cells))
        console().print(table if jobs else "no dead letters")
        return 0

    run(action)


@app.command()
def show(
    job_id: JobId, url: RedisUrl = DEFAULT_URL, queue: Queue = "default", shards: Shards = 1
) -> None:
    """Print one dead letter with its spec, as JSON."""

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            job = await producer.dead.show(job_id)
        text = msgspec.json.format(msgspec.json.encode(_readable(job))).decode()
        print(harmless(text) if sys.stdout.isatty() else text)
        return 0

    run(action)


def _readable(job: DeadJob) -> dict[str, Any]:
    """With the spec as the object that its JSON is; a spec that is none stays a text."""
    fields = msgspec.structs.asdict(job)
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeError):
        fields["spec"] = msgspec.json.decode(job.spec)
    return fields


@app.command()
def requeue(
    job_id: JobId, url: RedisUrl = DEFAULT_URL, queue: Queue = "default", shards: Shards = 1
) -> None:
    """Submit a dead job again under a new id, and print that id."""

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            print(await producer.dead.requeue(job_id))
        return 0

    run(action)


@app.command()
def purge(url: RedisUrl = DEFAULT_URL, queue: Queue = "default", shards: Shards = 1) -> None:
    """Drop all dead letters, and print how many there were."""

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            print(await producer.dead.purge())
        return 0

    run(action)
