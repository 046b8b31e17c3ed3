"""The commands of `mlxq`: submit, follow, abort, status, and those that other parts register.

Exit codes: 0 the job is done, 1 a failure (one line on stderr), 2 bad usage, 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.live import Live

from mlxq import __version__
from mlxq.producer import dead_commands
from mlxq.producer.job_view import abort_interrupted, name_job, show, tell
from mlxq.producer.options import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Queue,
    RedisUrl,
    Shards,
    console,
    naming_flags,
    open_producer,
    run,
    submitted_where,
)
from mlxq.producer.stream import START
from mlxq.protocol.errors import BadRequest
from mlxq.protocol.events import EventId
from mlxq.protocol.keys import Lane

WATCH_S = 1.0

app = typer.Typer(
    name="mlxq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mlxq {__version__}")
        raise typer.Exit


@app.callback()
def mlxq(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Text generation jobs on a Redis queue."""


@app.command()
def submit(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the user says; - is stdin.")],
    system: Annotated[str | None, typer.Option(help="System message in front of it.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: go on from TEXT.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; else up to 1,024.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Nothing ends the output before.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus: sample from this share alone.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="STRING", help="Ends the output; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    priority: Annotated[Lane, typer.Option(help="Lane of the queue.")] = "normal",
    deadline_s: Annotated[float | None, typer.Option(help="Fail after so many seconds.")] = None,
    job_id: Annotated[str | None, typer.Option(help="Id; random if not given.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the id, do not wait.")] = False,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the id on stderr, also to a file or pipe.")
    ] = False,
    url: RedisUrl = DEFAULT_URL,
    queue: Queue = "default",
    shards: Shards = 1,
) -> None:
    """Submit TEXT and print the answer as it comes. Ctrl-C aborts the job.

    On a terminal the job's id comes first, on stderr: follow and abort take it.
    """
    if text == "-":
        text = sys.stdin.read()

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            with naming_flags():
                job = await producer.submit(
                    **_prompt(text, system, raw),
                    max_tokens=max_tokens,
                    min_tokens=min_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    stop=stop or (),
                    seed=seed,
                    priority=priority,
                    deadline_s=deadline_s,
                    job_id=job_id,
                )
            if detach:
                print(job.id)
                return 0
            if verbose or sys.stderr.isatty():
                name_job(job)
            try:
                return await show(producer, job, START, as_json)
            except asyncio.CancelledError:
                await abort_interrupted(job)
                raise
            except BrokenPipeError:
                await job.abort()
                raise

    run(action)


def _prompt(text: str, system: str | None, raw: bool) -> dict[str, Any]:
    """TEXT as the arguments that `Producer.submit` takes."""
    if not text.strip():
        raise BadRequest("TEXT is empty")
    if raw:
        if system is not None:
            raise BadRequest("--system is a part of the chat template: leave it out, or --raw")
        return {"prompt": text}
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


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
            return await show(producer, producer.attach(job_id), EventId.parse(after), as_json)

    run(action)


@app.command()
def abort(
    job_id: JobId, url: RedisUrl = DEFAULT_URL, queue: Queue = "default", shards: Shards = 1
) -> None:
    """End a job, queued or running. Prints aborted, finished, unknown or requested.

    unknown is a failure: the id may be misspelt.
    """

    async def action() -> int:
        async with open_producer(url, queue, shards) as producer:
            outcome = await producer.attach(job_id).abort()
        print(outcome)
        if outcome == "unknown":
            tell(f"no job {job_id} is known {submitted_where(queue, shards)}")
        return 1 if outcome == "unknown" else 0

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


def _register(entry: EntryPoint) -> None:
    """Adds a command of another part. Loading it must be quick: its own imports come late."""

    def lacks(error: ImportError) -> NoReturn:
        extra = ",".join(entry.extras) or entry.name
        tell(f'{entry.name}: {error}; it needs: pip install "mlxq[{extra}]"')
        raise typer.Exit(2) from None

    settings = {}
    try:
        command = entry.load()
    except ImportError as error:
        missing = error
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}

        def command() -> None:
            """Not installed."""
            lacks(missing)

    @wraps(command)
    def call(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("mlxq"):
                raise
            lacks(error)

    app.command(entry.name, context_settings=settings)(call)


app.add_typer(dead_commands.app, name="dead")
for _entry in entry_points(group="mlxq.commands"):
    _register(_entry)
