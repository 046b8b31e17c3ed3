"""A row's bytes: frozen once sent, nothing lost between EMIT and FINISH."""

from __future__ import annotations

import msgspec
import pytest

from mlxq.protocol.events import Started, encode_event
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import LOOK_SEQ, Scripts, Taken
from mlxq.worker.chat import Tokenizer
from mlxq.worker.output import OutputStage
from mlxq.worker.rows import LONG_TRANSCRIPT_EVENTS, LONG_TRANSCRIPT_IDS, Row, Rows

SCRIPTS = Scripts(Keys("q"))
STARTED = Started(attempt=3, worker="me", model="m", prompt_tokens=4)
HEAD = encode_event(STARTED)


def _row(tokenizer: Tokenizer, *, seq: int = 0, tokens: int = 0, solo: bool = False) -> Row:
    row = Row(Taken("job", 3, seq, tokens, solo, b"{}"))
    row.begin(STARTED, OutputStage(tokenizer, []), prompt_tokens=4)
    assert row.open()
    return row


def _finish_events(row: Row) -> list[dict[str, object]]:
    call = row.finishing("me.1", SCRIPTS)
    assert call is not None
    return [msgspec.json.decode(arg) for arg in call.args[8:]]  # type: ignore[arg-type]


def test_a_row_that_is_not_begun_only_looks() -> None:
    row = Row(Taken("job", 1, 0, 0, False, b"{}"))
    assert [item.seq for item in row.outgoing()] == [LOOK_SEQ]


def test_head_and_tokens_are_numbered_on_and_counted(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer, seq=7, tokens=20)
    row.add("ab", [1, 2])
    head, token = row.outgoing()
    assert (head.seq, head.tokens, head.json) == (8, 20, HEAD)
    assert (token.seq, token.tokens) == (9, 22)
    assert msgspec.json.decode(token.json) == {"type": "token", "text": "ab", "ids": [1, 2]}


def test_unanswered_events_keep_their_bytes_and_later_tokens_wait(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer)
    row.add("a", [1])
    first = row.outgoing()[:]
    row.add("b", [2])
    assert row.outgoing() == first
    for item in first:
        row.stored(item)
    [second] = row.outgoing()
    assert (second.seq, second.tokens) == (3, 2)
    assert msgspec.json.decode(second.json)["ids"] == [2]
    row.stored(second)
    assert [item.seq for item in row.outgoing()] == [LOOK_SEQ]


def test_finish_carries_head_and_buffer_of_a_row_that_ends_before_its_first_flush(
    tokenizer: Tokenizer,
) -> None:
    row = _row(tokenizer)
    row.add("a", [1])
    row.finish("stop")
    assert row.outgoing() == []
    assert [event["type"] for event in _finish_events(row)] == ["started", "token", "done"]


def test_finish_follows_unanswered_events_and_is_made_once(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer)
    row.add("a", [1])
    frozen = row.outgoing()[:]
    row.add("b", [2])
    row.finish("length")
    assert row.outgoing() == frozen
    call = row.finishing("me.1", SCRIPTS)
    assert call is not None and call is row.finishing("me.1", SCRIPTS)
    assert call.args[4:6] == (3, 2)  # seq behind the two frozen events, all ids
    for item in frozen:
        row.stored(item)
    assert row.finishing("me.1", SCRIPTS) is call


def test_failure_publishes_what_was_buffered_first(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer)
    row.add("a", [1])
    row.fail("internal", "broken", retryable=True)
    *_, token, failed = _finish_events(row)
    assert token["ids"] == [1]
    assert (failed["code"], failed["retryable"]) == ("internal", True)


def test_only_the_first_ending_counts(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer)
    row.finish("stop")
    row.fail("internal", "late")
    assert _finish_events(row)[-1]["type"] == "done"


def test_long_transcripts_gather_ids(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer, seq=LONG_TRANSCRIPT_EVENTS, tokens=5000)
    row.stored(row.outgoing()[0])
    for token in range(1, LONG_TRANSCRIPT_IDS):
        row.add("x", [token])
        assert [item.seq for item in row.outgoing()] == [LOOK_SEQ]
    row.add("x", [9])
    [item] = row.outgoing()
    assert len(msgspec.json.decode(item.json)["ids"]) == LONG_TRANSCRIPT_IDS


def test_text_of_an_earlier_attempt_is_not_published_again(tokenizer: Tokenizer) -> None:
    row = Row(Taken("job", 2, 3, 4, False, b"{}"))
    row.begin(STARTED, OutputStage(tokenizer, []), prompt_tokens=1, skip=3)
    row.open()
    row.add("ab", [1])
    row.add("cde", [2])
    token = msgspec.json.decode(row.outgoing()[1].json)
    assert (token["text"], token["ids"]) == ("de", [1, 2])


def test_a_suspect_is_unproven_until_a_token_is_stored(tokenizer: Tokenizer) -> None:
    row = _row(tokenizer, solo=True)
    assert row.unproven
    row.add("a", [1])
    for item in list(row.outgoing()):
        row.stored(item)
    assert not row.unproven


async def test_table_counts_slots_and_knows_when_it_is_empty(tokenizer: Tokenizer) -> None:
    changes: list[int] = []
    rows = Rows(on_change=lambda table: changes.append(table.occupied))
    row = _row(tokenizer)
    rows.add(row)
    assert (rows.occupied, rows.keys, rows.empty.is_set()) == (1, (row.key,), False)
    row.finish("stop")
    rows.ended(row)
    assert (rows.occupied, len(rows)) == (0, 1)
    assert rows.remove(row) and not rows.remove(row)
    assert rows.empty.is_set()
    assert changes == [1, 0, 0]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_result_holds_the_whole_output(tokenizer: Tokenizer, reason: str) -> None:
    row = _row(tokenizer)
    assert row.stage is not None
    ids = tokenizer.encode_continuation("the fox")
    row.add(row.stage.feed(ids).text, ids)
    row.finish("stop" if reason == "stop" else "length")
    call = row.finishing("me.1", SCRIPTS)
    assert call is not None
    result = msgspec.json.decode(call.args[7])  # type: ignore[arg-type]
    assert (result["text"], result["token_ids"]) == ("the fox", ids)
    assert (result["finish_reason"], result["usage"]["completion_tokens"]) == (reason, len(ids))
