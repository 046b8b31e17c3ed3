"""The checker has teeth: each kind of damage to a good round is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from mlxq.protocol.events import (
    Done,
    Event,
    Failed,
    Requeued,
    Result,
    Resumed,
    Started,
    Token,
    Usage,
    encode_event,
    encode_result,
)
from ops.lib.soak.check import check_events, check_hash, check_reading, read_transcript
from ops.lib.soak.load import Reading
from ops.lib.soak.news import Violation
from ops.lib.soak.plan import ENDLESS, JobPlan, ReaderPlan, Shape, plan_round
from ops.lib.synthetic import answer, answer_text

Damage = Callable[[list[Event]], object]

PLAN = JobPlan("r1-7", 0.0, 0, 6, "x", "normal", readers=(ReaderPlan(0),))
WORDS = answer_text(PLAN.id, 6).split(" ")[1:]


def token(event_id: str, first: int, last: int) -> Token:
    text = "".join(f" {word}" for word in WORDS[first:last])
    return Token(id=event_id, text=text, ids=answer(PLAN.id, last)[first:])


def transcript() -> list[Event]:
    """Six tokens over two attempts."""
    return [
        Started(id="1-1", attempt=1, worker="w1", model="m", prompt_tokens=1),
        token("1-2", 0, 2),
        token("1-3", 2, 3),
        Requeued(id="1-4", reason="drain"),
        Resumed(id="2-5", attempt=2, worker="w2", model="m", tokens=3),
        token("2-6", 3, 6),
        Done(id="2-7", finish_reason="length", attempts=2, usage=Usage(1, 6)),
    ]


def numbered(events: list[Event]) -> list[Event]:
    """The same events without a gap in seq."""
    return [
        msgspec.structs.replace(event, id=f"{event.id.split('-')[0]}-{number}")
        for number, event in enumerate(events, 1)
    ]


def failed(code: str) -> Failed:
    return Failed(id="2-7", code=code, message="", attempts=2)


def aborted() -> Done:
    return Done(id="2-7", finish_reason="aborted", attempts=2)


def test_a_good_transcript_passes() -> None:
    check_events(PLAN, transcript())


DAMAGES: dict[str, Damage] = {
    "nothing": lambda events: events.clear(),
    "no end": lambda events: events.pop(),
    "two ends": lambda events: events.append(
        Done(id="2-8", finish_reason="length", attempts=2),
    ),
    "a gap": lambda events: events.pop(2),
    "an event twice": lambda events: events.insert(3, events[2]),
    "attempts that descend": lambda events: events.__setitem__(
        5, msgspec.structs.replace(events[5], id="1-6")
    ),
    "a lost token": lambda events: events.__setitem__(
        slice(None), numbered([*events[:2], *events[3:]])
    ),
    "a token twice": lambda events: events.__setitem__(
        slice(None), numbered([*events[:3], *events[2:]])
    ),
    "a restart": lambda events: events.__setitem__(5, token("2-6", 0, 3)),
    "text without ids": lambda events: events.__setitem__(
        2, Token(id="1-3", text=f" {WORDS[2]} {WORDS[2]}", ids=answer(PLAN.id, 3)[2:])
    ),
    "an early end": lambda events: events.__setitem__(5, token("2-6", 3, 5)),
    "an innocent given up": lambda events: events.__setitem__(6, failed("worker_lost")),
    "an internal failure": lambda events: events.__setitem__(6, failed("internal")),
    "an abort nobody asked for": lambda events: events.__setitem__(6, aborted()),
    "a deadline it had not": lambda events: events.__setitem__(6, failed("deadline_exceeded")),
    "a stop it had not": lambda events: events.__setitem__(
        6, Done(id="2-7", finish_reason="stop", attempts=2)
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_transcript_is_found(name: str) -> None:
    events = transcript()
    DAMAGES[name](events)
    with pytest.raises(Violation):
        check_events(PLAN, events)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"abort_s": 1.0}, aborted()),
        ({"deadline_s": 1.0}, failed("deadline_exceeded")),
        ({"fault": "poison"}, failed("worker_lost")),
        ({"abort_s": 1.0, "tokens": ENDLESS}, aborted()),
    ],
)
def test_an_end_that_was_asked_for_is_right(changes: dict[str, object], end: Event) -> None:
    plan = JobPlan(**{**vars(PLAN), **changes})
    check_events(plan, [*transcript()[:-1], end])
    with pytest.raises(Violation):
        check_events(PLAN, [*transcript()[:-1], end])


@pytest.mark.parametrize(("attempt", "right"), [(4, True), (3, False)])
def test_an_innocent_is_given_up_only_after_two_attempts_without_a_token(
    attempt: int, right: bool
) -> None:
    end = msgspec.structs.replace(failed("worker_lost"), id=f"{attempt}-7", attempts=attempt)
    events = [*transcript()[:-1], end]
    if right:
        return check_events(PLAN, events)
    with pytest.raises(Violation, match="worker_lost"):
        check_events(PLAN, events)


def test_a_submit_that_was_withdrawn_may_end_aborted() -> None:
    check_events(PLAN, [*transcript()[:-1], aborted()], withdrawn=True)


def test_a_stop_string_ends_the_text() -> None:
    plan = dataclasses.replace(PLAN, stop=f" {WORDS[3]}")
    stopped = Done(id="1-3", finish_reason="stop", attempts=1)
    check_events(plan, [transcript()[0], token("1-2", 0, 3), stopped])
    with pytest.raises(Violation, match="text"):
        check_events(plan, [transcript()[0], token("1-2", 0, 4), stopped])


def fields() -> dict[bytes, bytes]:
    terminal = msgspec.structs.replace(transcript()[-1], id="")
    result = Result("".join(f" {word}" for word in WORDS), answer(PLAN.id, 6), "length")
    return {
        b"state": b"done",
        b"seq": b"7",
        b"tokens": b"6",
        b"by": b"w2.x/2",
        b"terminal": encode_event(terminal),
        b"result": encode_result(result),
    }


def test_a_good_hash_passes() -> None:
    check_hash(PLAN, fields(), transcript())


@pytest.mark.parametrize(
    "change",
    [
        {b"state": b"running"},
        {b"state": b"failed"},
        {b"seq": b"6"},
        {b"tokens": b"7"},
        {b"owner": b"w1.x"},
        {b"by": b""},
        {b"terminal": encode_event(msgspec.structs.replace(failed("internal"), id=""))},
        {b"result": encode_result(Result("else", answer(PLAN.id, 6), "length"))},
        {b"result": encode_result(Result(PLAN.text, answer(PLAN.id, 5), "length"))},
    ],
)
def test_a_hash_that_contradicts_is_found(change: dict[bytes, bytes]) -> None:
    with pytest.raises(Violation):
        check_hash(PLAN, {**fields(), **change}, transcript())


@pytest.mark.parametrize(
    "given",
    [
        transcript()[1:],
        transcript()[:-1],
        [*transcript()[:3], *transcript()[2:]],
        [*transcript()[:1], token("1-2", 0, 1), *transcript()[2:]],
    ],
)
def test_a_reader_that_was_given_something_else_is_found(given: list[Event]) -> None:
    check_reading(Reading(ReaderPlan(0), transcript()), transcript())
    with pytest.raises(Violation):
        check_reading(Reading(ReaderPlan(0), given), transcript())
    with pytest.raises(Violation):
        check_reading(Reading(ReaderPlan(0), transcript(), error="lost"), transcript())


def test_an_unknown_event_is_found() -> None:
    with pytest.raises(Violation, match="unknown type"):
        read_transcript([(b"1-1", {b"e": b'{"type":"other"}'})])


def test_a_round_is_drawn_from_its_seed_alone() -> None:
    shape = Shape()
    assert plan_round(5, 2, shape) == plan_round(5, 2, shape)
    assert plan_round(5, 2, shape) != plan_round(5, 3, shape) != plan_round(6, 3, shape)
