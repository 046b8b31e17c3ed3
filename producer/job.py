"""The handle of one submitted job: its text, its events, its result, and the way to abort it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Literal, NamedTuple, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from mlxq.producer.hub import Feed
from mlxq.producer.shard import Shard
from mlxq.producer.stream import START, TERMINAL, Stream
from mlxq.protocol import events as wire
from mlxq.protocol.errors import JobFailed, ReadError, TranscriptExpired, UnknownJob
from mlxq.protocol.events import Done, Event, EventId, Failed, Terminal, Token
from mlxq.protocol.scripts import run

AbortOutcome = Literal["aborted", "finished", "unknown", "requested"]

# How long a submitted job stays subscribed for its first reader. Later ones subscribe anew.
LINGER_S = 10.0
ABORT_KEY_S = 3_600


class Result(wire.Result, frozen=True):
    """The whole output of a job that is done or aborted. `attempts`: how often it was taken."""

    attempts: int = msgspec.field(default_factory=lambda: 1)  # so that 1 is written out too


class Ended(NamedTuple):
    """How a job ended; `result` is absent if a script ended it."""

    terminal: Terminal
    result: wire.Result | None


class JobHandle:
    """One job, as its submitter or any other process sees it. Used by any task of its loop.

    `async for text in job` yields the text as it comes, `events()` everything. Each iteration
    has a place of its own in the job, so several can run at a time. `id` is all that another
    process needs to attach.
    """

    def __init__(
        self,
        job_id: str,
        shard: Shard,
        *,
        timeout_s: float,
        feed: Feed | None = None,
    ) -> None:
        self.id = job_id
        self._scripts = shard.scripts
        self._keys = shard.keys
        self._connections = shard.connections
        self._hub = shard.hub
        self._timeout_s = timeout_s
        self._feed = feed
        if feed is not None:
            asyncio.get_running_loop().call_later(LINGER_S, self._let_go)

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yields the answer piece by piece, from its start; ends when the job is done or aborted.

        Raises JobFailed for a failed job, else what `events` raises. If the transcript has
        expired before anything was yielded, the stored result comes as one piece.
        """
        begun = False
        async with aclosing(self.events()) as events:
            while True:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                except TranscriptExpired:
                    if begun:
                        raise
                    break
                if isinstance(event, Failed):
                    raise _failure(event)
                if isinstance(event, Token) and event.channel is None and event.text:
                    begun = True
                    yield event.text
        if text := (await self.result()).text:
            yield text

    def events(self, after: str | EventId | None = None) -> AsyncGenerator[Event, None]:
        """Yields the events behind the cursor `after` (the `id` of an event), to the last one.

        Raises BadCursor, UnknownJob, TranscriptExpired (`result` may still be there) or
        HistoryRewritten. It waits through an outage of the server, however long.
        """
        return self._follow(EventId.parse(after) if isinstance(after, str) else after or START)

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109
        """The whole output, once the job has ended; waits `timeout` seconds at most.

        Raises JobFailed, TimeoutError (the job goes on), else what `events` raises.
        """
        async with asyncio.timeout(timeout):
            ended = await self._ended()
            if ended is None:
                with suppress(TranscriptExpired):
                    async with aclosing(self.events()) as events:
                        async for _ in events:
                            pass
                ended = await self._ended()
            if ended is None:
                raise TranscriptExpired(f"{self.id}: the transcript is gone and the job goes on")
            return await self._output(ended)

    async def abort(self) -> AbortOutcome:
        """Ends the job, queued or running; its last event is then `done` with reason `aborted`.

        Returns aborted (it has ended), finished (it had ended before), unknown (a submit of it
        that arrives within a minute is aborted), or requested where this user may not end a
        job itself: a worker then does. Raises ServerUnreachable.
        """
        return await self._connections.ask(self._abort, allowed_s=self._timeout_s)

    async def _abort(self, client: Redis) -> AbortOutcome:
        try:
            outcome = await run(client, self._scripts.abort(self.id))
            return cast(AbortOutcome, outcome)
        except ResponseError as error:
            if not _is_forbidden(error):
                raise
        await client.set(self._keys.abort(self.id), 1, ex=ABORT_KEY_S)
        return "requested"

    async def _follow(self, after: EventId) -> AsyncGenerator[Event, None]:
        feed, self._feed = self._feed or self._hub.join(self._keys.live(self.id)), None
        stream = Stream(self.id, self._keys, self._connections, feed, after)
        try:
            while not stream.ended:
                for event in await stream.next():
                    yield event
        finally:
            self._hub.leave(feed)

    def _let_go(self) -> None:
        if self._feed is not None:
            self._hub.leave(self._feed)
            self._feed = None

    async def _ended(self) -> Ended | None:
        async def read(client: Redis) -> list[Any]:
            return await client.hmget(self._keys.job(self.id), ["state", "terminal", "result"])

        state, terminal, result = await self._connections.ask(read)
        if state is None:
            raise UnknownJob(f"no job {self.id} is known")
        if state not in TERMINAL or terminal is None:
            return None
        try:
            event = wire.decode_event(terminal)
            stored = wire.decode_result(result) if result else None
        except msgspec.MsgspecError as error:
            raise ReadError(f"{self.id}: the end of the job is damaged: {error}") from None
        if not isinstance(event, Done | Failed):
            raise ReadError(f"{self.id}: the end of the job is damaged: it says {event!r:.200}")
        return Ended(event, stored)

    async def _output(self, ended: Ended) -> Result:
        terminal, stored = ended
        if isinstance(terminal, Failed):
            raise _failure(terminal)
        if stored is not None:
            fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
            return Result(**fields, attempts=terminal.attempts)
        async with aclosing(self.events()) as events:
            tokens = [event async for event in events if isinstance(event, Token)]
        token_ids = [token_id for token in tokens for token_id in token.ids]
        logprobs = [logprob for token in tokens for logprob in token.logprobs or ()]
        return Result(
            text="".join(token.text for token in tokens if token.channel is None),
            token_ids=token_ids,
            logprobs=logprobs if len(logprobs) == len(token_ids) > 0 else None,
            finish_reason=terminal.finish_reason,
            usage=terminal.usage,
            attempts=terminal.attempts,
        )


def _failure(event: Failed) -> JobFailed:
    return JobFailed(event.code, event.message, event.retryable)


def _is_forbidden(error: ResponseError) -> bool:
    # Inside a script Redis 7.0, Valkey and later Redis each word it differently.
    words = ("NOPERM", "ACL failure", "user executing the script")
    return isinstance(error, NoPermissionError) or any(word in str(error) for word in words)
