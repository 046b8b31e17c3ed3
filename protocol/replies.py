"""What the scripts reply: statuses, and the readings of whole replies.

The parsers raise TypeError, ValueError or OverflowError for a reply of another form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from mlxq.protocol.keys import LANES, Lane

# Statuses of EMIT, FINISH, BEAT and RELEASE, one per item.
DONE: Final = 1
REPEATED: Final = 2  # was done before: the earlier reply was lost
FENCED: Final = -1  # not owner, not this attempt, or not running
ABORTED: Final = -2  # closed by this call
EXPIRED: Final = -3  # past its deadline: closed by this call
GAP: Final = -4  # seq is more than one ahead: an earlier event is missing
BROKEN: Final = -5  # the transcript contradicts the hash: closed by this call

_STATUSES: Final = frozenset({DONE, REPEATED, FENCED, ABORTED, EXPIRED, GAP, BROKEN})


class Enqueued(NamedTuple):
    """Reply of ENQUEUE. `detail` is the state for ok and dup, the depth for full."""

    status: Literal["ok", "dup", "full", "bad_id", "too_large"]
    detail: str


class Taken(NamedTuple):
    """One job handed out by TAKE: `seq` events and `tokens` ids are stored already.

    `lane` is the job's, or high for one whose turn has come before those of higher lanes.
    """

    id: str
    attempt: int
    seq: int
    tokens: int
    solo: bool
    spec: bytes
    lane: Lane = "normal"


class Take(NamedTuple):
    """Reply of TAKE: wait for work from `bell_id`; `more` asks for another TAKE at once."""

    bell_id: str
    more: bool
    make_room: bool
    jobs: list[Taken]


class Sweep(NamedTuple):
    """Reply of SWEEP: entries looked at, jobs closed, whether the cursor wrapped."""

    looked: int
    closed: int
    wrapped: bool


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def parse_status(reply: Any) -> int:
    status = int(reply)
    if status not in _STATUSES:
        raise ValueError(status)
    return status


def parse_statuses(number: int) -> Callable[[Any], list[int]]:
    def parse(reply: list[Any]) -> list[int]:
        if len(reply) != number:
            raise ValueError(len(reply))
        return [parse_status(status) for status in reply]

    return parse


def parse_outcome(reply: Any) -> str:
    outcome = _text(reply)
    if outcome not in ("aborted", "finished", "unknown"):
        raise ValueError(outcome)
    return outcome


def parse_enqueued(reply: list[Any]) -> Enqueued:
    status, *rest = (part if isinstance(part, int) else _text(part) for part in reply)
    detail = str(rest[0]) if rest else ""
    match status:
        case "ok" | "dup" | "bad_id" | "too_large":
            return Enqueued(status, detail)
        case "full":
            return Enqueued(status, str(int(detail)))
    raise ValueError(status)


def parse_take(reply: list[Any]) -> Take:
    bell_id, more, make_room, *jobs = reply
    return Take(
        _text(bell_id), bool(int(more)), bool(int(make_room)), [parse_taken(*job) for job in jobs]
    )


def parse_taken(
    job_id: Any, attempt: Any, seq: Any, tokens: Any, solo: Any, spec: Any, lane: Any
) -> Taken:
    if not isinstance(spec, bytes):
        raise TypeError(type(spec))
    name = LANES[LANES.index(_text(lane))]
    return Taken(_text(job_id), int(attempt), int(seq), int(tokens), bool(int(solo)), spec, name)


def parse_sweep(reply: list[Any]) -> Sweep:
    looked, closed, wrapped = reply
    return Sweep(int(looked), int(closed), bool(int(wrapped)))
