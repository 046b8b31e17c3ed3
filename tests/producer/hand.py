"""A worker that the test moves by hand: it takes a job and says what it is told."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from redis.asyncio import Redis

from mlxq.protocol.events import (
    Done,
    Event,
    Failed,
    FinishReason,
    Result as StoredResult,
    Resumed,
    Started,
    Token,
    Usage,
    encode_event,
    encode_result,
)
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import DONE, EmitItem, PublishCommand, Scripts, Taken, run

LEASE_MS = 60_000


class Hand:
    """One job in the hand of one worker process. Token ids are counted up from 0."""

    def __init__(self, client: Redis, scripts: Scripts, owner: str, taken: Taken) -> None:
        self.client = client
        self._scripts = scripts
        self._owner = owner
        self.id = taken.id
        self.attempt = taken.attempt
        self.seq = taken.seq
        self.tokens = taken.tokens
        self.spec = taken.spec
        self.said = ""

    def publish(self, command: PublishCommand) -> None:
        """With the other command, what is said is stored and reaches no subscriber."""
        self._scripts = Scripts(self._scripts.keys, command)

    async def start(self) -> None:
        """The first event of this attempt."""
        if self.seq == 0:
            await self.emit(
                Started(attempt=self.attempt, worker=self._owner, model="m", prompt_tokens=3)
            )
        else:
            await self.emit(
                Resumed(attempt=self.attempt, worker=self._owner, model="m", tokens=self.tokens)
            )

    async def say(self, *texts: str) -> None:
        """One token event per text, all in one EMIT."""
        await self.emit(*(self._token(text) for text in texts))

    async def emit(self, *events: Event) -> None:
        await self.emit_json(*(encode_event(event) for event in events))

    async def emit_json(self, *events: bytes) -> None:
        statuses = await self.offer(*events)
        assert statuses == [DONE] * len(events), statuses

    async def offer(self, *events: bytes) -> list[int]:
        """One EMIT; its statuses, which tell whether the job is still ours."""
        items = []
        for event in events:
            self.seq += 1
            items.append(EmitItem(self.id, self.attempt, self.seq, self.tokens, event))
        return await run(self.client, self._scripts.emit(self._owner, items))

    async def finish(self, *texts: str, reason: FinishReason = "stop") -> None:
        """The last texts, the result and the terminal event, in one FINISH."""
        events: list[Event] = [self._token(text) for text in texts]
        usage = Usage(3, self.tokens)
        result = StoredResult(self.said, list(range(self.tokens)), reason, usage)
        events.append(Done(finish_reason=reason, attempts=self.attempt, usage=usage))
        await self._end("done", encode_result(result), events)

    async def fail(self, code: str, message: str) -> None:
        await self._end("failed", b"", [Failed(code=code, message=message, attempts=self.attempt)])

    async def release(self) -> None:
        call = self._scripts.release(self._owner, "drain", [(self.id, self.attempt)])
        assert await run(self.client, call) == [DONE]

    def _token(self, text: str) -> Token:
        self.said += text
        self.tokens += 1
        return Token(text=text, ids=[self.tokens - 1])

    async def _end(self, state: str, result: bytes, events: Sequence[Event]) -> None:
        call = self._scripts.finish(
            self._owner,
            self.id,
            self.attempt,
            seq=self.seq + 1,
            tokens=self.tokens,
            state="done" if state == "done" else "failed",
            result=result,
            events=[encode_event(event) for event in events],
        )
        assert await run(self.client, call) == DONE


class HandWorker:
    """Takes jobs of one queue for `Hand`s."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._scripts = Scripts(keys)
        self._owner = f"hand.{uuid.uuid4().hex}"

    async def take(self) -> Hand:
        """The next job of the queue, waiting for it."""
        while not (hands := await self.take_all(1)):
            await asyncio.sleep(0.01)
        return hands[0]

    async def take_all(self, n: int) -> list[Hand]:
        call = self._scripts.take(self._owner, n, lease_ms=LEASE_MS)
        jobs = (await run(self._client, call)).jobs
        return [Hand(self._client, self._scripts, self._owner, job) for job in jobs]
