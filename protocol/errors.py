"""Every error of mlxq, and the codes that travel on the wire.

MlxqError
├── BadRequest          the job cannot be run as written        wire: bad_request
│   └── ContextOverflow prompt + max_tokens exceed the context  wire: context_overflow
├── SubmitRefused       the server refused the job at submit
│   ├── QueueFull       the queue holds `cap` jobs; try later
│   └── TooLarge        the encoded job exceeds `max_bytes`
├── JobFailed           the job ended with a `failed` event; has .code .message .retryable
├── UnknownJob          no such job, or its retention has passed
├── ReadError           the stream of a job cannot be followed any further
│   ├── BadCursor           the cursor is ahead of the job
│   ├── TranscriptExpired   the events after the cursor are gone
│   └── HistoryRewritten    a failover lost events that were already delivered
└── ServerUnreachable   no answer from Redis within the time allowed
"""

from __future__ import annotations

from typing import Literal

FailureCode = Literal[
    "bad_request",
    "context_overflow",
    "deadline_exceeded",
    "worker_lost",
    "internal",
]


class MlxqError(Exception):
    """Root of the tree: catches everything this package raises on purpose."""


class BadRequest(MlxqError):
    """The job cannot be run as written; repeating it cannot help."""

    code: FailureCode = "bad_request"


class ContextOverflow(BadRequest):
    """Prompt and max_tokens together exceed what the model or the machine can hold."""

    code: FailureCode = "context_overflow"


class SubmitRefused(MlxqError):
    """The job was not enqueued."""


class QueueFull(SubmitRefused):
    """The queue is at its cap; `depth` jobs are queued or running."""

    def __init__(self, depth: int) -> None:
        super().__init__(f"queue_full: {depth} jobs are queued or running")
        self.depth = depth


class TooLarge(SubmitRefused):
    """The encoded job exceeds the queue's size limit in bytes."""


class JobFailed(MlxqError):
    """The job ended with a `failed` event."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


class UnknownJob(MlxqError):
    """No job with this id is known, or its retention has passed."""


class ReadError(MlxqError):
    """The stream of a job cannot be followed any further."""


class BadCursor(ReadError):
    """The cursor is ahead of everything the job has produced."""


class TranscriptExpired(ReadError):
    """The events after the cursor are gone; only the result may still exist."""


class HistoryRewritten(ReadError):
    """A failover lost events that had been delivered already: never guess, tell."""


class ServerUnreachable(MlxqError):
    """Redis gave no answer within the time allowed."""
