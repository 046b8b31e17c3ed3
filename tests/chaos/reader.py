"""A job and everything its reader was given, with the time it came."""

from __future__ import annotations

import asyncio

from mlxq.producer import Producer
from mlxq.producer.job import JobHandle, Result
from mlxq.protocol.errors import MlxqError
from mlxq.protocol.events import Done, Event, EventId, Failed, Started, Terminal, Token
from ops.lib.synthetic import answer, answer_text

GUARD_S = 40.0  # no wait of these tests is longer, however slow the machine


class Reader:
    """Follows one job of a synthetic worker through the public producer, from its start.

    error   what ended the reading before a terminal event, if anything did
    ids     all token ids so far
    """

    def __init__(self, producer: Producer, job: JobHandle, tokens: int) -> None:
        self.id = job.id
        self.job = job
        self.tokens = tokens
        self.error: MlxqError | None = None
        self.ids: list[int] = []
        self._producer = producer
        self._seen: list[tuple[float, Event]] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        now = asyncio.get_running_loop().time
        try:
            async for event in self.job.events():
                self._seen.append((now(), event))
                if isinstance(event, Token):
                    self.ids += event.ids
        except MlxqError as error:
            self.error = error

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self._seen]

    @property
    def worker(self) -> str:
        """Who ran the job first."""
        [first, *_] = [event.worker for event in self.events if isinstance(event, Started)]
        return first

    @property
    def terminal(self) -> Terminal:
        """The last event; the reading must have come to its end."""
        assert self.error is None, repr(self.error)
        last = self.events[-1]
        assert isinstance(last, Done | Failed), last
        return last

    async def reach(self, tokens: int = 0, events: int = 1) -> None:
        """Returns once so many tokens and events have come."""
        async with asyncio.timeout(GUARD_S):
            while len(self.ids) < tokens or len(self._seen) < events:
                assert not self._task.done(), f"ended too soon: {self.error!r} {self.events[-1:]}"
                await asyncio.sleep(0.005)

    async def go_on(self, tokens: int = 1) -> None:
        """Returns once so many more tokens have come, or the job has ended."""
        goal = len(self.ids) + tokens
        async with asyncio.timeout(GUARD_S):
            while len(self.ids) < goal and not self._task.done():
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        """Returns when the reading is over, whatever ended it."""
        await asyncio.wait_for(asyncio.shield(self._task), GUARD_S)

    def stop(self) -> None:
        self._task.cancel()

    def pause_s(self, since_s: float) -> float | None:
        """The longest time without an event after `since_s`. None if nothing came any more."""
        times = [since_s, *(seen_s for seen_s, _ in self._seen if seen_s > since_s)]
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        return max(gaps, default=None)

    def check_exact(self) -> None:
        """Every event once and in order, one terminal event, and the tokens that must be."""
        ids = [EventId.parse(event.id) for event in self.events]
        assert [event_id.seq for event_id in ids] == list(range(1, len(ids) + 1)), self.id
        assert ids == sorted(ids), self.id
        ends = [isinstance(event, Done | Failed) for event in self.events]
        assert ends == [False] * (len(ends) - 1) + [True], (self.id, self.error)
        text = "".join(event.text for event in self.events if isinstance(event, Token))
        assert self.ids == answer(self.id, len(self.ids)), self.id
        assert text == answer_text(self.id, len(self.ids)), self.id
        terminal = self.terminal
        if isinstance(terminal, Done) and terminal.finish_reason == "length":
            assert len(self.ids) == self.tokens
        assert terminal.usage.completion_tokens == len(self.ids)

    async def check_stored(self) -> None:
        """A reader that comes only now is given the same, and so is who asks for the result."""
        job = self._producer.attach(self.id)
        again = [event async for event in job.events()]
        assert again == self.events
        if isinstance(self.terminal, Done):
            result: Result = await job.result(GUARD_S)
            assert result.token_ids == self.ids
            assert result.text == answer_text(self.id, len(self.ids))
