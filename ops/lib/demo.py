"""The demo: eight prompts on two workers; one job is aborted, one worker is killed in mid-stream.

Exit status 0 means that it went as it should: every job ended once, the aborted one was aborted,
those of the killed worker were finished by the other, and each stream equals the stored result.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console

from mlxq.producer import Done, Failed, JobHandle, Producer, Requeued, Resumed, Started, Token
from ops.lib import arguments
from ops.lib.demo_view import Board, LiveView, Pane, PlainView, View, summary
from ops.lib.model import demo_model
from ops.lib.stack import Stack, guarded

WORKERS = ("mac-1", "mac-2")
SLOTS = 6  # per worker: eight jobs need both, and one worker has room for most of the other's
LEASE_S = 4.0  # short, so that nobody waits long; the default is 15
QUESTIONS = (
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain how a rainbow is made, for a child.",
    "Give me a simple recipe for tomato soup.",
    "Describe a walk through an old forest in autumn.",
    "Why is the sea salty?",
    "Tell me about the history of the bicycle.",
    "Write a letter to a friend about a trip to the mountains.",
    "How do bees make honey?",
)
ABORTED = 3  # index of the job that is aborted
ABORT_AT_TOKENS = 16
KILL_AT_TOKENS = arguments.LEAST_TOKENS // 2  # of the first job whose worker is killed


class Demo:
    """One run of the scenario. Everything happens on the event loop."""

    def __init__(self, stack: Stack, producer: Producer, view: View, board: Board) -> None:
        self.stack = stack
        self.producer = producer
        self.view = view
        self.board = board
        self.lost_at: float | None = None
        self.changed = asyncio.Event()

    async def run(self, max_tokens: int) -> None:
        await self.start_workers()
        self.board.stage = "eight prompts on two workers"
        jobs = [await self.submit(pane, max_tokens) for pane in self.board.panes]
        async with asyncio.TaskGroup() as group:
            for pane, job in zip(self.board.panes, jobs, strict=True):
                group.create_task(self.follow(pane, job))
            group.create_task(self.disturb(jobs))
        self.board.stage = "checking"
        for pane, job in zip(self.board.panes, jobs, strict=True):
            await self.check(pane, job)

    async def start_workers(self) -> None:
        self.board.stage = "workers load the model"
        threads = max(1, (os.cpu_count() or 2) // len(WORKERS))
        for name in WORKERS:
            worker = self.stack.start_worker(name, threads=threads)
            self.view.say(f"worker {name} starts (pid {worker.pid})")
        await self.stack.serving(*WORKERS)
        self.view.say("both workers serve")

    async def submit(self, pane: Pane, max_tokens: int) -> JobHandle:
        return await self.producer.submit(
            messages=[{"role": "user", "content": pane.question}],
            max_tokens=max_tokens,
            temperature=0.7,
            top_p=0.9,
            seed=pane.number,
            job_id=f"demo-{pane.number}",
        )

    async def follow(self, pane: Pane, job: JobHandle) -> None:
        """Shows one job's events as they come."""
        submitted = time.monotonic()
        async for event in job.events():
            match event:
                case Started():
                    pane.workers.append(event.worker)
                    pane.state = "streaming"
                case Resumed():
                    pane.workers.append(event.worker)
                    pane.state = "streaming"
                    self.resumed(pane, event)
                case Token():
                    if pane.first_token_s is None:
                        pane.first_token_s = time.monotonic() - submitted
                    pane.add(event.text, len(event.ids))
                case Requeued():
                    pane.state = "waiting"
                case Done():
                    pane.finish = event.finish_reason
                    pane.state = "aborted" if event.finish_reason == "aborted" else "done"
                case Failed():
                    pane.finish = f"failed: {event.code}"
                    pane.state = "failed"
            self.view.streamed(pane)
            self.changed.set()

    def resumed(self, pane: Pane, event: Resumed) -> None:
        waited = "" if self.lost_at is None else f", {time.monotonic() - self.lost_at:.1f} s later"
        self.view.say(
            f"job {pane.number} goes on at token {event.tokens} on {event.worker}{waited}"
        )

    async def disturb(self, jobs: list[JobHandle]) -> None:
        """Aborts one job, then kills the worker of another, each in mid-stream."""
        aborted = self.board.panes[ABORTED]
        await self.until(lambda: aborted.ended or aborted.tokens >= ABORT_AT_TOKENS)
        outcome = await jobs[ABORTED].abort()
        self.view.say(f"job {aborted.number} is aborted by its submitter: {outcome}")

        story = self.board.panes[0]
        running = [pane for pane in self.board.panes if pane is not aborted]
        await self.until(
            lambda: (
                story.ended
                or (story.tokens >= KILL_AT_TOKENS and all(pane.tokens for pane in running))
            )
        )
        name = story.workers[-1]
        held = [pane for pane in running if pane.workers[-1:] == [name] and not pane.ended]
        self.stack.kill(name)
        self.lost_at = time.monotonic()
        for pane in held:
            pane.state = "worker lost"
            self.view.streamed(pane)
        numbers = ", ".join(str(pane.number) for pane in held)
        self.view.say(f"worker {name} is killed (kill -9); it held the jobs {numbers}")
        self.board.stage = f"{name} is dead; its jobs go on once its lease of {LEASE_S:.0f} s ends"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once an event of any job has made `condition` true."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def check(self, pane: Pane, job: JobHandle) -> None:
        """Raises RuntimeError unless the job ended as it should and nothing was lost or doubled."""
        wanted = {"aborted"} if pane is self.board.panes[ABORTED] else {"stop", "length"}
        if pane.finish not in wanted:
            raise RuntimeError(f"job {pane.number} ended with {pane.finish or 'nothing'}")
        result = await job.result(timeout=30)
        if pane.finish == "aborted":
            return
        # What is held back to the end travels with the result; the stream has it as last events.
        if (result.text, len(result.token_ids)) != (pane.text, pane.tokens):
            raise RuntimeError(f"job {pane.number}: the stream differs from the result")


async def play(stack: Stack, view: View, board: Board, max_tokens: int) -> None:
    async with Producer(stack.url, queue=stack.queue) as producer:
        await Demo(stack, producer, view, board).run(max_tokens)


def main() -> int:
    given = arguments.demo()
    return guarded(lambda: show(given.plain, given.max_tokens))


def show(plain: bool, max_tokens: int) -> int:
    console = Console()
    if not console.is_terminal:
        console.width = 110
    board = Board([Pane(number, question) for number, question in enumerate(QUESTIONS, 1)])
    options = ("--max-batch", str(SLOTS), "--lease-s", str(LEASE_S))
    model = demo_model()
    lines = plain or not console.is_terminal
    view = PlainView() if lines else LiveView(board, console)
    with Stack(model, "demo", *options) as stack:
        with view:
            view.say(f"server at {stack.url} (pid {stack.server_pid}), model {model.name}")
            asyncio.run(play(stack, view, board, max_tokens))
    console.print(summary(board, console.width))
    resumed = [pane for pane in board.panes if len(pane.workers) > 1]
    if not resumed:
        raise RuntimeError("no job was resumed: the killed worker had finished them all")
    print(f"{len(board.panes)} jobs, 1 aborted, {len(resumed)} resumed on the other worker", end="")
    print("; every stream equals the stored result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
