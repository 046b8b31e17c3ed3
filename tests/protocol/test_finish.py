"""FINISH: the last tokens, the terminal event, the result and the end of the entry, at once."""

from __future__ import annotations

import json

import pytest
from redis.exceptions import ResponseError

from mlxq.protocol.scripts import ABORTED, BROKEN, DONE, FENCED, GAP, REPEATED, EmitItem
from tests.protocol.wire import DONE_EVENT, TOKEN, Wire, heard

FAILED_EVENT = b'{"type":"failed","code":"bad_request","message":"no","attempts":1}'


async def test_everything_at_once(wire: Wire) -> None:
    await wire.enqueue(retention_ms=500_000, replay_ms=100_000)
    await wire.take()
    await wire.emit("w1", EmitItem("a", 1, 1, 1, TOKEN))
    async with wire.listening() as subscription:
        status = await wire.finish(
            "w1", "a", 1, TOKEN, TOKEN, DONE_EVENT, seq=2, tokens=3, result=b'{"text":"aaa"}'
        )
        assert status == DONE
        assert await heard(subscription, 3) == [
            b'{"id":"1-2",' + TOKEN[1:],
            b'{"id":"1-3",' + TOKEN[1:],
            b'{"id":"1-4",' + DONE_EVENT[1:],
        ]
    assert await wire.is_closed()
    assert await wire.event_ids() == ["1-1", "1-2", "1-3", "1-4"]
    job = await wire.job()
    wanted = {
        "state": "done",
        "seq": "4",
        "tokens": "3",
        "by": "w1/1",
        "result": '{"text":"aaa"}',
        "terminal": DONE_EVENT.decode(),
    }
    assert {name: job[name] for name in wanted} == wanted
    assert 100_000 < await wire.client.pttl(wire.keys.job("a")) <= 500_000
    assert 0 < await wire.client.pttl(wire.keys.events("a")) <= 100_000
    assert await wire.holders() == []


async def test_a_failed_job_without_result(wire: Wire) -> None:
    await wire.running()
    assert await wire.finish("w1", "a", 1, FAILED_EVENT, state="failed") == DONE
    assert await wire.is_closed()
    assert await wire.fields("a", "state") == ["failed"]
    assert "result" not in await wire.job()


async def test_without_a_receipt(wire: Wire) -> None:
    await wire.enqueue()
    await wire.take()
    assert await wire.finish() == DONE


async def test_repeated_by_the_same_owner_and_attempt(wire: Wire) -> None:
    await wire.running()
    assert await wire.finish() == DONE
    before = await wire.job()
    assert await wire.finish() == REPEATED
    assert await wire.job() == before
    assert len(await wire.events()) == 1


async def test_repeated_by_another_is_fenced(wire: Wire) -> None:
    await wire.running()
    await wire.finish()
    assert await wire.finish("w2") == FENCED
    assert await wire.finish("w1", "a", 2) == FENCED


async def test_after_a_script_closed_the_job_it_is_fenced(wire: Wire) -> None:
    await wire.running()
    await wire.ask_abort()
    assert await wire.look() == ABORTED
    assert await wire.finish() == FENCED
    assert len(await wire.events()) == 1


async def test_an_unknown_job_is_fenced(wire: Wire) -> None:
    assert await wire.finish() == FENCED
    assert await wire.events() == []


@pytest.mark.parametrize("seq", [0, 1, 3])
async def test_seq_must_be_the_next(wire: Wire, seq: int) -> None:
    await wire.running(tokens=1)
    assert await wire.finish(seq=seq) == GAP
    assert await wire.event_ids() == ["1-1"]
    assert await wire.fields("a", "state") == ["running"]
    assert await wire.finish(seq=2) == DONE


async def test_a_zombie_is_fenced(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    await wire.take("w2")
    assert await wire.finish(seq=2) == FENCED
    assert await wire.finish("w2", "a", 2, seq=2) == DONE
    assert await wire.event_ids() == ["1-1", "2-2"]


async def test_a_natural_end_beats_an_abort_key_and_a_deadline(wire: Wire) -> None:
    await wire.running()
    await wire.ask_abort()
    await wire.pass_deadline()
    assert await wire.finish() == DONE
    assert await wire.is_closed()
    assert [event for _, event in await wire.events()] == [json.loads(DONE_EVENT)]


async def test_a_broken_transcript_closes_the_job(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.command("XADD", wire.keys.events("a"), "1-9", "e", "{}")
    assert await wire.finish("w1", "a", 1, TOKEN, DONE_EVENT, seq=2, tokens=2) == BROKEN
    assert await wire.is_closed()
    assert await wire.fields("a", "state", "by", "tokens") == ["failed", "", "1"]
    [(_, event)] = await wire.events()
    assert event["code"] == "internal"


@pytest.mark.parametrize(
    "args",
    [
        ("w1", "a", 1, 1, 0, "done", ""),
        ("w1", "a", 1, 1, 0, "finished", "", DONE_EVENT),
        ("w1", "a", "x", 1, 0, "done", "", DONE_EVENT),
    ],
)
async def test_wrong_arguments_are_told(wire: Wire, args: tuple[str | int | bytes, ...]) -> None:
    await wire.running()
    call = wire.scripts.abort("a")
    source = wire.scripts.finish(
        "w1", "a", 1, seq=1, tokens=0, state="done", result=b"", events=[DONE_EVENT]
    ).script.source
    with pytest.raises(ResponseError, match="expected pub owner id attempt"):
        await wire.command("EVAL", source, 1, call.key, "PUBLISH", *args)
    assert await wire.fields("a", "state") == ["running"]
