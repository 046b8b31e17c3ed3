"""What all commands of `mlxq` share: flags, the producer they use, and how they end."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from mlxq.producer.client import Producer
from mlxq.protocol.errors import BadRequest, MlxqError, UnknownJob

TIMEOUT_S = 10.0

RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="MLXQ_REDIS_URL",
        metavar="URL",
        help="redis://HOST, rediss:// (TLS), unix://, redis+sentinel://HOST,HOST/MASTER or "
        "redis+cluster://HOST,HOST.",
    ),
]
Queue = Annotated[str, typer.Option("--queue", envvar="MLXQ_QUEUE", metavar="Q", help="Queue.")]
Shards = Annotated[
    int, typer.Option("--shards", envvar="MLXQ_SHARDS", help="Parts the queue is split into.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line per event.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="Job id.")]

DEFAULT_URL = "redis://localhost:6379"

_FIELD = re.compile(r"`\$\.(\w+)[^`]*`|\b(m(?:ax|in)_tokens|temperature|top_p|deadline_s)\b")
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters but tab and newline


@asynccontextmanager
async def open_producer(url: str, queue: str, shards: int) -> AsyncGenerator[Producer]:
    """A producer that gives up sooner than a program would. Raises BadRequest for a bad URL.

    An UnknownJob that leaves the block says where the job was looked for.
    """
    try:
        producer = Producer(url, queue, shards=shards, submit_timeout_s=TIMEOUT_S)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    async with producer:
        try:
            yield producer
        except UnknownJob as error:
            raise UnknownJob(f"{error} {submitted_where(queue, shards)}") from None


def submitted_where(queue: str, shards: int) -> str:
    """A job is found with the flags of its submit alone."""
    return f"in queue {queue} with --shards {shards}; both must be as at its submit"


@contextmanager
def naming_flags() -> Iterator[None]:
    """A BadRequest that leaves the block names flags where it named fields of the job."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(_FIELD.sub(_flag, str(error))) from None


def _flag(found: re.Match[str]) -> str:
    field: str = found[1] or found[2]
    return "TEXT" if field in ("prompt", "messages") else f"--{field.replace('_', '-')}"


def console() -> Console:
    """For tables: as wide as the terminal, and wide enough for one line a row in a file."""
    return Console(width=None if sys.stdout.isatty() else 240)


def harmless(text: str) -> str:
    """What others wrote, without the characters that a terminal would obey instead of showing."""
    return _OBEYED.sub("\ufffd", text)


def run(action: Callable[[], Coroutine[Any, Any, int]]) -> None:
    """Runs a command and ends the process with its exit code."""
    # A failure is told in one line; what was overcome on the way is not.
    logging.getLogger("mlxq").addHandler(logging.NullHandler())
    try:
        code = asyncio.run(action())
    except KeyboardInterrupt:
        code = 130
    except MlxqError as error:
        print(f"mlxq: {harmless(str(error))}", file=sys.stderr)
        code = 2 if isinstance(error, BadRequest) else 1
    raise typer.Exit(code)
