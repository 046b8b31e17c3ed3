"""The events of a job, as stored in its transcript and published on its channel.

Stored JSON carries no id: the stream entry's id is the event's id. On the channel the same
object has `"id":"<attempt>-<seq>"` put in first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Struct

from mlxq.protocol.errors import BadCursor
from mlxq.protocol.jobs import TokenId

T = TypeVar("T")

Channel = Literal["reasoning", "tool_call"]
FinishReason = Literal["stop", "length", "tool_calls", "aborted"]
RequeueReason = Literal["drain", "preempt", "crash"]


class EventId(NamedTuple):
    """`attempt-seq`. seq counts over all attempts, so a gap shows from two ids alone."""

    attempt: int
    seq: int

    @classmethod
    def parse(cls, text: str | bytes) -> EventId:
        """Reads `attempt-seq`; raises BadCursor for anything else."""
        if isinstance(text, bytes):
            text = text.decode("ascii", "replace")
        attempt, dash, seq = text.partition("-")
        if not (dash and _is_number(attempt) and _is_number(seq)):
            raise BadCursor(f"bad event id {text[:80]!r}: expected attempt-seq, such as 1-17")
        return cls(int(attempt), int(seq))

    def __str__(self) -> str:
        return f"{self.attempt}-{self.seq}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _written(make: Callable[[], T]) -> T:
    """A default that is written out too: msgspec leaves out only what has no factory."""
    default: T = msgspec.field(default_factory=lambda: make())
    return default


class Usage(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """Token counts of a job over all its attempts.

    cached_tokens   of the prompt, in the last attempt: those that the prefix cache had
    """

    prompt_tokens: int = _written(int)
    completion_tokens: int = _written(int)
    cached_tokens: int = 0


class Timings(Struct, frozen=True):
    """Seconds, measured by the worker of the last attempt. first_token_s counts from admission."""

    first_token_s: float = 0.0
    total_s: float = 0.0


class TopLogprob(Struct, frozen=True):
    """One of the most probable tokens at a place of the output."""

    token: str
    id: TokenId
    logprob: float


class TokenLogprob(Struct, frozen=True, omit_defaults=True):
    """Natural logarithm of the probability of one token of the output.

    It is that of the model after penalties and logit_bias, before temperature and the cut-offs.

    token           the token alone, as text: U+FFFD for a part of a character
    top_logprobs    best first, as many as the job asked for
    """

    token: str
    logprob: float
    top_logprobs: list[TopLogprob] | None = None


class _Event(Struct, frozen=True, tag_field="type", kw_only=True, omit_defaults=True):
    id: str = ""


class Started(_Event, frozen=True, tag="started", kw_only=True):
    """First event of a job: `worker` begins it with the model of this fingerprint.

    cached_tokens   of the prompt: those that the prefix cache had
    """

    attempt: int
    worker: str
    model: str
    prompt_tokens: int
    cached_tokens: int = 0


class Resumed(_Event, frozen=True, tag="resumed", kw_only=True):
    """First event of a later attempt: generation goes on behind `tokens` stored tokens.

    cached_tokens   of the prompt and these tokens: those that the prefix cache had
    """

    attempt: int
    worker: str
    model: str
    tokens: int
    cached_tokens: int = 0


class Token(_Event, frozen=True, tag="token", kw_only=True):
    """One or more new token ids and the text they released (may be empty).

    logprobs    one for each id, if the job asked for them
    """

    text: str
    ids: list[TokenId]
    channel: Channel | None = None
    logprobs: list[TokenLogprob] | None = None


class Requeued(_Event, frozen=True, tag="requeued", kw_only=True):
    """The worker gave the job back; another one goes on."""

    reason: str


class Done(_Event, frozen=True, tag="done", kw_only=True):
    """The job ended well, or was aborted."""

    finish_reason: FinishReason
    attempts: int
    usage: Usage = _written(Usage)
    timings: Timings = _written(Timings)


class Failed(_Event, frozen=True, tag="failed", kw_only=True):
    """The job ended without a full answer; `retryable` says whether a new submit may help."""

    code: str
    message: str
    retryable: bool = _written(bool)
    attempts: int
    usage: Usage = _written(Usage)


Event = Started | Resumed | Token | Requeued | Done | Failed
Terminal = Done | Failed


class Unknown(Struct, frozen=True, kw_only=True):
    """An event of a type this version does not know: readers count it and show nothing."""

    id: str = ""
    type: str


class Result(Struct, frozen=True, omit_defaults=True):
    """What FINISH stores in the job hash: the whole output of a job that ended well.

    logprobs    one for each id, if the job asked for them
    """

    text: str
    token_ids: list[TokenId]
    finish_reason: FinishReason
    usage: Usage = _written(Usage)
    timings: Timings = _written(Timings)
    logprobs: list[TokenLogprob] | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)
_unknown = msgspec.json.Decoder(Unknown)
_KNOWN_TYPES = frozenset(kind.__struct_config__.tag for kind in get_args(Event))
_result = msgspec.json.Decoder(Result)


def encode_event(event: Event) -> bytes:
    """JSON for the transcript. `id` must be empty: the scripts give it."""
    return _encoder.encode(event)


def decode_event(data: bytes | str, event_id: str | None = None) -> Event | Unknown:
    """One event from the channel, or from the transcript when `event_id` is given.

    A type this version does not know gives Unknown; unknown fields are ignored. Raises
    msgspec.MsgspecError for anything else: a malformed token must not be passed over.
    """
    event: Event | Unknown
    try:
        event = _decode(_decoder, data)
    except msgspec.ValidationError:
        event = _decode(_unknown, data)
        if event.type in _KNOWN_TYPES:
            raise
    return event if event_id is None else msgspec.structs.replace(event, id=event_id)


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | str) -> T:
    try:
        return decoder.decode(data)
    except (RecursionError, UnicodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def encode_result(result: Result) -> bytes:
    return _encoder.encode(result)


def decode_result(data: bytes | str) -> Result:
    """Raises msgspec.MsgspecError for what is no result."""
    return _decode(_result, data)
