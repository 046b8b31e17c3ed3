"""The eight Lua scripts as typed calls; `python -m mlxq.protocol.scripts DIR` writes them out.

A `Call` is a frozen request: running the same Call again sends the same bytes, which is what
the protocol asks for when a reply was lost. Build calls with `Scripts`, run them with `run`,
`run_all` (one round trip) or `run_blocking`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError

from mlxq.protocol.keys import LANES, Keys, Lane
from mlxq.protocol.replies import (
    ABORTED as ABORTED,
    BROKEN as BROKEN,
    DONE as DONE,
    EXPIRED as EXPIRED,
    FENCED as FENCED,
    GAP as GAP,
    REPEATED as REPEATED,
    Enqueued as Enqueued,
    Sweep as Sweep,
    Take as Take,
    Taken as Taken,
    parse_enqueued,
    parse_outcome,
    parse_status,
    parse_statuses,
    parse_sweep,
    parse_take,
)

T = TypeVar("T")
Arg = str | bytes | int

ReleaseReason = Literal["drain", "preempt", "no_room", "crash"]
PublishCommand = Literal["PUBLISH", "SPUBLISH"]


NAMES: Final = ("enqueue", "take", "emit", "finish", "beat", "release", "abort", "sweep")


@dataclass(frozen=True, slots=True)
class Script:
    """The complete source of one script and the SHA-1 by which the server knows it."""

    source: str
    sha: str


@cache
def script(name: str) -> Script:
    """The script of `protocol/lua/NAME.lua`, with the part that all share in front."""
    folder = files("mlxq.protocol") / "lua"
    parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("lib", name)]
    source = "".join(parts)
    return Script(source, hashlib.sha1(source.encode()).hexdigest())


def write_sources(folder: Path) -> list[Path]:
    """Writes the eight complete sources as NAME.lua, for `redis-cli --eval` and other languages."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.lua" for name in NAMES]
    for name, path in zip(NAMES, paths, strict=True):
        path.write_text(script(name).source, encoding="utf-8")
    return paths


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One script call with the bytes it sends and the reading of its reply."""

    script: Script
    key: str
    args: tuple[Arg, ...]
    parse: Callable[[Any], T]


class EmitItem(NamedTuple):
    """One event for EMIT, or a look (seq 0, empty json). `tokens` counts all ids of the job."""

    id: str
    attempt: int
    seq: int
    tokens: int
    json: bytes


LOOK_SEQ: Final = 0


def look(job_id: str, attempt: int) -> EmitItem:
    """An EMIT item that stores nothing and tells whether the job is still ours."""
    return EmitItem(job_id, attempt, LOOK_SEQ, 0, b"")


class Scripts:
    """Builds the calls of one queue. `publish` is SPUBLISH in a cluster."""

    def __init__(self, keys: Keys, publish: PublishCommand = "PUBLISH") -> None:
        self.keys = keys
        self.publish = publish

    def enqueue(
        self,
        job_id: str,
        spec: bytes,
        *,
        lane: Lane = "normal",
        deadline_ms: int = 0,
        cap: int = 10_000,
        retention_ms: int = 3_600_000,
        replay_ms: int = 300_000,
        max_bytes: int = 8 * 2**20,
    ) -> Call[Enqueued]:
        args: tuple[Arg, ...] = (job_id, spec, lane, deadline_ms, cap)
        args += (retention_ms, replay_ms, max_bytes)
        return self._call("enqueue", self.keys.job(job_id), args, parse_enqueued)

    def take(
        self,
        owner: str,
        n: int,
        *,
        lease_ms: int,
        alone: bool = False,
        recover: bool = False,
        max_crashes: int = 10,
        lanes: int = len(LANES),
    ) -> Call[Take]:
        """`lanes`: how many, from the highest, are asked."""
        args = (owner, n, lease_ms, int(alone), int(recover), max_crashes, lanes)
        return self._call("take", self.keys.bell, args, parse_take)

    def emit(self, owner: str, items: Sequence[EmitItem]) -> Call[list[int]]:
        args: tuple[Arg, ...] = (owner, *(field for item in items for field in item))
        return self._call("emit", self.keys.bell, args, parse_statuses(len(items)))

    def finish(
        self,
        owner: str,
        job_id: str,
        attempt: int,
        *,
        seq: int,
        tokens: int,
        state: Literal["done", "failed"],
        result: bytes,
        events: Sequence[bytes],
    ) -> Call[int]:
        """`events`: the last token events, then the terminal. `result` may be empty."""
        args: tuple[Arg, ...] = (owner, job_id, attempt, seq, tokens, state, result, *events)
        return self._call("finish", self.keys.job(job_id), args, parse_status)

    def beat(self, owner: str, jobs: Sequence[tuple[str, int]]) -> Call[list[int]]:
        args: tuple[Arg, ...] = (owner, *(field for job in jobs for field in job))
        return self._call("beat", self.keys.bell, args, parse_statuses(len(jobs)))

    def release(
        self, owner: str, reason: ReleaseReason, jobs: Sequence[tuple[str, int]]
    ) -> Call[list[int]]:
        args: tuple[Arg, ...] = (owner, reason, *(field for job in jobs for field in job))
        return self._call("release", self.keys.bell, args, parse_statuses(len(jobs)))

    def abort(self, job_id: str) -> Call[str]:
        """Replies `aborted` (closed now), `finished` or `unknown`."""
        return self._call("abort", self.keys.job(job_id), (job_id,), parse_outcome)

    def sweep(self, chunk: int = 100) -> Call[Sweep]:
        return self._call("sweep", self.keys.bell, (chunk,), parse_sweep)

    def _call(
        self, name: str, key: str, args: tuple[Arg, ...], parse: Callable[[Any], T]
    ) -> Call[T]:
        return Call(script(name), key, (self.publish, *args), parse)


async def run(client: AsyncRedis, call: Call[T]) -> T:
    """Runs one call; a server that does not know the script yet is given it.

    Raises redis-py's errors, InvalidResponse among them for a reply that no script gives.
    """
    try:
        reply = await client.evalsha(call.script.sha, 1, call.key, *call.args)
    except NoScriptError:
        reply = await client.eval(call.script.source, 1, call.key, *call.args)
    return _parsed(call, reply)


async def run_all(client: AsyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """Runs calls in order in one round trip; each answer is the reply or an exception.

    Raises only when the connection fails, and then any prefix of the calls may have run.
    """
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.evalsha(call.script.sha, 1, call.key, *call.args)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    answers: list[Any] = []
    for call, reply in zip(calls, replies, strict=True):
        if isinstance(reply, NoScriptError):
            answers.append(await _run_or_error(client, call))
        else:
            answers.append(_parsed_or_error(call, reply))
    return answers


async def _run_or_error(client: AsyncRedis, call: Call[T]) -> T | ResponseError | InvalidResponse:
    try:
        return await run(client, call)
    except (ResponseError, InvalidResponse) as error:
        return error


def _parsed_or_error(call: Call[T], reply: Any) -> T | Exception:
    if isinstance(reply, Exception):
        return reply
    try:
        return _parsed(call, reply)
    except InvalidResponse as error:
        return error


def run_blocking(client: redis.Redis, call: Call[T]) -> T:
    """`run` for a caller without an event loop."""
    try:
        reply = client.evalsha(call.script.sha, 1, call.key, *call.args)
    except NoScriptError:
        reply = client.eval(call.script.source, 1, call.key, *call.args)
    return _parsed(call, reply)


def _parsed(call: Call[T], reply: Any) -> T:
    try:
        return call.parse(reply)
    except (TypeError, ValueError, OverflowError):
        raise InvalidResponse(f"a script gave a reply of another form: {reply!r:.200}") from None


def main(arguments: Sequence[str]) -> int:
    """`python -m mlxq.protocol.scripts DIR`."""
    if len(arguments) != 1:
        print("usage: python -m mlxq.protocol.scripts DIR", file=sys.stderr)
        return 2
    for path in write_sources(Path(arguments[0])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
