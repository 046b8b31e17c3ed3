"""A job's output on a terminal or in a pipe, and what a user is told beside it on stderr."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import msgspec
import typer

from mlxq.producer.client import Producer
from mlxq.producer.job import JobHandle
from mlxq.producer.options import harmless
from mlxq.producer.stream import START
from mlxq.protocol.errors import JobFailed, MlxqError, TranscriptExpired
from mlxq.protocol.events import Done, EventId, Failed, Token, encode_event

# How long nothing may happen before a user is told that no worker is there.
PATIENCE_S = 5.0


async def show(producer: Producer, job: JobHandle, after: EventId, as_json: bool) -> int:
    """Prints the job's output; the exit code. Raises what reading it raises."""
    note = asyncio.create_task(_note_no_worker(producer))
    text = ""
    shown = False
    write = harmless if sys.stdout.isatty() else str
    try:
        async for event in job.events(after):
            note.cancel()
            shown = True
            if as_json:
                print(write(encode_event(event).decode()), flush=True)
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
        note.cancel()
        if text and not text.endswith("\n"):
            print(flush=True)
    return 0


async def abort_interrupted(job: JobHandle) -> None:
    """Aborts a job whose reader is going, and says what has become of it."""
    try:
        outcome = await job.abort()
    except MlxqError as error:
        tell(f"{harmless(str(error))}; the job may go on: mlxq abort {job.id}")
    else:
        tell(f"job {job.id}: {'abort requested' if outcome == 'requested' else outcome}")


def name_job(job: JobHandle) -> None:
    """The id, for follow and abort from elsewhere."""
    typer.secho(f"job {job.id}", err=True, dim=True)


def tell(line: str) -> None:
    print(f"mlxq: {line}", file=sys.stderr, flush=True)


async def _note_no_worker(producer: Producer) -> None:
    await asyncio.sleep(PATIENCE_S)
    with suppress(MlxqError):  # a submitter may have no right to know
        status = await producer.status()
        if not status.workers:
            tell(f"no worker serves queue {status.queue}; waiting (Ctrl-C to stop)")
