"""The commands of `mlxq`: submit, follow, abort, status, and those that other parts register.

Exit codes: 0 the job is done, 1 a failure (one line on stderr), 2 bad usage, 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import msgspec
import typer
from rich.live import Live

from mlxq.producer import dead_commands
from mlxq.producer.job import JobHandle
from mlxq.producer.options import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Queue,
    RedisUrl,
    Shards,
    console,
    harmless,
    open_producer,
    run,
)
from mlxq.producer.stream import START
from mlxq.protocol.errors import JobFailed, MlxqError, TranscriptExpired
from mlxq.protocol.events import Done, EventId, Failed, Token, encode_event
from mlxq.protocol.keys import Lane

WATCH_S = 1.0

app = typer.Typer(
    name="mlxq",
    help="Text generation jobs on a Redis queue.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def submit(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the user says; - is stdin.")],
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: go on from TEXT.")] = False,
    priority: Annotated[Lane, typer.Option(help="Lane of the queue.")] = "normal",
    deadline_s: Annotated[float | None, typer.Option(help="Fail after so many seconds.")] = None,
    job_id: Annotated[str | None, typer.Option(help="Id; random if not given.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the id, do not wait.")] = False,
    as_json: AsJson = False,
    url: RedisUrl = DEFAULT_URL,
    queue: Queue = "default",
    shards: Shards = 1,
) -> None:
    """Submit TEXT and print the answer as it comes. Ctrl-C aborts the job."""
    if text == "-":
        text = sys.stdin.read()
    prompt: dict[str, Any]
    prompt = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            job = await producer.submit(
                **prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                priority=priority,
                deadline_s=deadline_s,
                job_id=job_id,
            )
            if detach:
                print(job.id)
                return 0
            try:
                return await _show(job, START, as_json)
            except (asyncio.CancelledError, BrokenPipeError):
                await job.abort()
                raise

    run(action)


@app.command()
def follow(
    job_id: JobId,
    after: Annotated[str, typer.Option(metavar="CURSOR", help="Only behind this event.")] = "0-0",
    as_json: AsJson = False,
    url: RedisUrl = DEFAULT_URL,
    queue: Queue = "default",
    shards: Shards = 1,
) -> None:
    """Print the output of a job, from its start or a cursor. Ctrl-C leaves the job running."""

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            await producer.ping()
            return await _show(producer.attach(job_id), EventId.parse(after), as_json)

    run(action)


@app.command()
def abort(
    job_id: JobId, url: RedisUrl = DEFAULT_URL, queue: Queue = "default", shards: Shards = 1
) -> None:
    """End a job, queued or running. Prints aborted, finished, unknown or requested."""

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            print(await producer.attach(job_id).abort())
        return 0

    run(action)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw until Ctrl-C.")] = False,
    url: RedisUrl = DEFAULT_URL,
    queue: Queue = "default",
    shards: Shards = 1,
) -> None:
    """Show the workers of a queue, how many jobs it holds and how long they wait."""
    from mlxq.producer.status_view import render

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            if as_json:
                print(msgspec.json.encode(await producer.status()).decode())
            elif not watch:
                console().print(render(await producer.status()))
            else:
                with Live(render(await producer.status()), auto_refresh=False) as live:
                    while True:
                        await asyncio.sleep(WATCH_S)
                        live.update(render(await producer.status()), refresh=True)
        return 0

    run(action)


async def _show(job: JobHandle, after: EventId, as_json: bool) -> int:
    """Prints the job's output; the exit code. Raises what reading it raises."""
    text = ""
    shown = False
    write = harmless if sys.stdout.isatty() else str
    try:
        async for event in job.events(after):
            shown = True
            if as_json:
                print(encode_event(event).decode(), flush=True)
            elif isinstance(event, Token) and event.channel is None:
                text = event.text or text
                print(write(event.text), end="", flush=True)
            if isinstance(event, Failed):
                raise JobFailed(event.code, event.message, event.retryable)
            if isinstance(event, Done) and event.finish_reason == "aborted":
                raise MlxqError("the job was aborted")
    except TranscriptExpired:
        if shown or after != START:
            raise
        result = await job.result()
        text = msgspec.json.encode(result).decode() if as_json else result.text
        print(write(text), end="")
    finally:
        if text and not text.endswith("\n"):
            print(flush=True)
    return 0


def _register(entry: EntryPoint) -> None:
    """Adds a command of another part. It is imported only when it is used."""

    def forward(context: typer.Context) -> None:
        try:
            command = entry.load()
        except ImportError as error:
            extra = ",".join(entry.extras) or entry.name
            print(
                f'mlxq {entry.name}: {error}; it needs: pip install "mlxq[{extra}]"',
                file=sys.stderr,
            )
            raise typer.Exit(2) from None
        inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        inner.command()(command)
        inner(args=context.args, prog_name=f"mlxq {entry.name}")

    app.command(
        entry.name,
        help=f"See: mlxq {entry.name} --help",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(forward)


app.add_typer(dead_commands.app, name="dead")
for _entry in entry_points(group="mlxq.commands"):
    _register(_entry)
