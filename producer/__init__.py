"""For submitters: submit, stream, resume, abort."""

from mlxq.producer.client import Producer
from mlxq.producer.job import JobHandle, Result
from mlxq.producer.status import Status, WorkerStatus
from mlxq.protocol.errors import (
    BadCursor,
    BadRequest,
    HistoryRewritten,
    JobFailed,
    MlxqError,
    QueueFull,
    ReadError,
    ServerUnreachable,
    SubmitRefused,
    TooLarge,
    TranscriptExpired,
    UnknownJob,
)
from mlxq.protocol.events import (
    Done,
    Event,
    EventId,
    Failed,
    Requeued,
    Resumed,
    Started,
    Token,
    encode_event,
)
from mlxq.protocol.jobs import Message, TextPart

__all__ = [
    "BadCursor",
    "BadRequest",
    "Done",
    "Event",
    "EventId",
    "Failed",
    "HistoryRewritten",
    "JobFailed",
    "JobHandle",
    "Message",
    "MlxqError",
    "Producer",
    "QueueFull",
    "ReadError",
    "Requeued",
    "Result",
    "Resumed",
    "ServerUnreachable",
    "Started",
    "Status",
    "SubmitRefused",
    "TextPart",
    "Token",
    "TooLarge",
    "TranscriptExpired",
    "UnknownJob",
    "WorkerStatus",
    "encode_event",
]
