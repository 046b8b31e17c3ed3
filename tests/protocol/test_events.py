"""Reading events: tolerant of what is newer, strict about what is malformed."""

from __future__ import annotations

import msgspec
import pytest

from mlxq.protocol.errors import BadCursor
from mlxq.protocol.events import Done, EventId, Token, Unknown, Usage, decode_event


def test_an_unknown_type_is_passed_over_with_its_id() -> None:
    event = decode_event(b'{"id":"1-4","type":"progress","percent":50}')
    assert event == Unknown(id="1-4", type="progress")


def test_unknown_fields_are_ignored() -> None:
    data = b'{"id":"1-2","type":"token","text":"a","ids":[1],"speed":9,"nested":{"x":[1]}}'
    assert decode_event(data) == Token(id="1-2", text="a", ids=[1])
    data = b'{"type":"done","finish_reason":"stop","attempts":1,"usage":{"saved_tokens":3}}'
    assert decode_event(data) == Done(finish_reason="stop", attempts=1, usage=Usage())


def test_the_transcript_gives_the_id() -> None:
    event = decode_event(b'{"type":"token","text":"a","ids":[1]}', "2-17")
    assert event.id == "2-17"
    assert decode_event(b'{"type":"new"}', "2-18") == Unknown(id="2-18", type="new")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not JSON",
        b"[]",
        b"{}",
        b'{"type":7}',
        b'{"type":"token","text":"a"}',
        b'{"type":"token","text":"a","ids":["1"]}',
        b'{"type":"done","finish_reason":"tired","attempts":1}',
        b'{"type":"failed","code":"internal"}',
    ],
)
def test_a_malformed_event_is_told(data: bytes) -> None:
    """Passing over a token or a terminal event would lose it without a trace."""
    with pytest.raises(msgspec.MsgspecError):
        decode_event(data)


def test_ids_are_numbers_and_sort_as_such() -> None:
    assert EventId.parse("1-17") == EventId(1, 17)
    assert EventId.parse(b"12-3") == EventId(12, 3)
    assert str(EventId(2, 10)) == "2-10"
    assert EventId.parse("2-10") > EventId.parse("2-9") > EventId.parse("1-11")


@pytest.mark.parametrize(
    "text", ["", "1", "1-", "-1", "a-1", "1-2-3", "1 - 2", "²-1", "1-" + "9" * 20]
)
def test_a_bad_cursor_is_told(text: str) -> None:
    with pytest.raises(BadCursor, match="expected attempt-seq"):
        EventId.parse(text)
