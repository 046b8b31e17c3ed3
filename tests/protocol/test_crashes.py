"""Crash accounting: who is charged, who is cleared, and who is given up."""

from __future__ import annotations

from mlxq.protocol.scripts import DONE, EmitItem, look, run
from tests.protocol.wire import LEASE_MS, SPEC, TOKEN, Wire


async def account(wire: Wire, job_id: str = "a") -> tuple[int, int]:
    """crashes, strikes"""
    crashes, strikes = await wire.fields(job_id, "crashes", "strikes")
    return int(crashes or 0), int(strikes or 0)


async def test_a_lapsed_lease_with_a_receipt_is_charged_with_a_strike(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a")
    await wire.take("w2")
    assert await account(wire) == (1, 1)


async def test_it_is_charged_once_however_often_it_is_looked_at(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a")
    for owner in ("w2", "w3", "w2"):
        await wire.take(owner)
    assert await account(wire) == (1, 1)


async def test_a_token_stored_in_the_attempt_clears_the_strikes(wire: Wire) -> None:
    await wire.enqueue()
    await wire.crash("a", "w1")
    [job] = (await wire.take("w2", alone=True)).jobs
    assert await wire.emit("w2", EmitItem("a", job.attempt, 1, 1, TOKEN)) == [DONE]
    assert await account(wire) == (1, 1)
    await wire.lapse("a")
    [job] = (await wire.take("w3")).jobs
    assert not job.solo
    assert await account(wire) == (2, 0)


async def test_an_event_without_a_token_clears_nothing(wire: Wire) -> None:
    await wire.enqueue()
    [job] = (await wire.take("w1")).jobs
    started = b'{"type":"started","attempt":1,"worker":"w1","model":"m","prompt_tokens":1}'
    assert await wire.emit("w1", EmitItem("a", 1, 1, 0, started)) == [DONE]
    await wire.lapse("a")
    await wire.take("w2")
    assert await account(wire) == (1, 1)


async def test_tokens_of_an_earlier_attempt_clear_nothing(wire: Wire) -> None:
    await wire.running(tokens=3)
    await wire.lapse("a")
    await wire.crash("a", "w2")
    await wire.take("w3")
    assert await account(wire) == (2, 1)


async def test_without_a_receipt_nobody_is_charged(wire: Wire) -> None:
    """The reply of TAKE was lost, so the worker never touched the job."""
    await wire.enqueue()
    await wire.take("w1")
    await wire.lapse("a")
    [job] = (await wire.take("w2")).jobs
    assert job.attempt == 2
    assert await account(wire) == (0, 0)


async def test_beat_is_a_receipt_too(wire: Wire) -> None:
    await wire.enqueue()
    await wire.take("w1")
    await wire.beat("w1", ("a", 1))
    await wire.lapse("a")
    await wire.take("w2")
    assert await account(wire) == (1, 1)


async def test_release_crash_is_charged(wire: Wire) -> None:
    await wire.running()
    assert await wire.release("w1", "crash", ("a", 1)) == [DONE]
    assert await account(wire) == (1, 1)
    assert await wire.fields("a", "releases") == ["0"]


async def test_release_crash_after_a_token_is_no_strike(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.release("w1", "crash", ("a", 1))
    assert await account(wire) == (1, 0)


async def test_other_releases_are_not_charged_and_clear_after_a_token(wire: Wire) -> None:
    await wire.enqueue()
    await wire.crash("a", "w1")
    [job] = (await wire.take("w2", alone=True)).jobs
    await wire.release("w2", "preempt", ("a", job.attempt))
    assert await account(wire) == (1, 1)
    [job] = (await wire.take("w2", alone=True)).jobs
    await wire.emit("w2", EmitItem("a", job.attempt, 2, 1, TOKEN))
    await wire.release("w2", "drain", ("a", job.attempt))
    assert await account(wire) == (1, 0)


async def test_a_pause_of_the_owner_itself_is_not_charged(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a")
    [job] = (await wire.take("w1")).jobs
    assert (job.attempt, job.solo) == (2, False)
    assert await account(wire) == (0, 0)


async def test_a_pause_after_a_token_clears_the_strikes(wire: Wire) -> None:
    await wire.enqueue()
    await wire.crash("a", "w1")
    [job] = (await wire.take("w2", alone=True)).jobs
    await wire.emit("w2", EmitItem("a", job.attempt, 1, 1, TOKEN))
    await wire.lapse("a")
    [job] = (await wire.take("w2")).jobs
    assert not job.solo
    assert await account(wire) == (1, 0)


async def test_three_crashes_two_of_them_in_a_row_without_a_token(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    await wire.crash("a", "w2")
    await wire.crash("a", "w3")
    assert await account(wire) == (2, 1)
    async with wire.listening() as subscription:
        assert (await wire.take("w4", alone=True)).jobs == []
        assert await subscription.get_message(timeout=5) is not None
    assert await account(wire) == (3, 2)
    assert await wire.is_closed()
    event_id, event = (await wire.events())[-1]
    assert event_id == "3-2"
    assert {name: event[name] for name in ("type", "code", "retryable", "attempts", "usage")} == {
        "type": "failed",
        "code": "worker_lost",
        "retryable": False,
        "attempts": 3,
        "usage": {"completion_tokens": 1},
    }
    [(_, dead)] = await wire.client.xrange(wire.keys.dead)
    assert dead == {
        b"reason": b"given up: 3 workers crashed with it",
        b"id": b"a",
        b"spec": SPEC,
        b"crashes": b"3",
        b"strikes": b"2",
        b"owner": b"w3",
    }


async def test_two_crashes_are_not_the_end(wire: Wire) -> None:
    await wire.enqueue()
    await wire.crash("a", "w1")
    await wire.crash("a", "w2")
    [job] = (await wire.take("w3", alone=True)).jobs
    assert (job.attempt, job.solo) == (3, True)
    assert await account(wire) == (2, 2)


async def test_a_poison_job_ends_after_three_crashes(wire: Wire) -> None:
    await wire.enqueue()
    for i in range(3):
        await wire.crash("a", f"w{i}")
    assert (await wire.take("w4")).jobs == []
    assert await wire.is_closed()


async def test_a_crashed_engine_counts_like_a_lapsed_lease(wire: Wire) -> None:
    await wire.enqueue()
    for i in range(3):
        [job] = (await wire.take(f"w{i}", alone=True)).jobs
        await wire.look(f"w{i}", "a", job.attempt)
        assert await wire.release(f"w{i}", "crash", ("a", job.attempt)) == [DONE]
    assert (await wire.take("w4", alone=True)).jobs == []
    assert await wire.is_closed()
    [(_, dead)] = await wire.client.xrange(wire.keys.dead)
    assert dead[b"owner"] == b"w2"


async def test_a_job_that_stores_tokens_survives_nine_crashes_and_not_ten(wire: Wire) -> None:
    await wire.enqueue()
    for i in range(10):
        [job] = (await wire.take(f"w{i}")).jobs
        assert not job.solo
        item = EmitItem("a", job.attempt, i + 1, i + 1, TOKEN)
        assert await wire.emit(f"w{i}", look("a", job.attempt), item) == [DONE, DONE]
        await wire.lapse("a")
    assert await account(wire) == (9, 0)
    assert (await wire.take("w11")).jobs == []
    assert await account(wire) == (10, 0)
    assert await wire.is_closed()


async def test_max_crashes_is_the_callers(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    call = wire.scripts.take("w2", 1, lease_ms=LEASE_MS, max_crashes=1)
    assert (await run(wire.client, call)).jobs == []
    assert await wire.is_closed()


async def test_twenty_hand_outs_that_were_never_acknowledged(wire: Wire) -> None:
    await wire.enqueue()
    for i in range(20):
        assert await wire.take_ids(f"w{i}") == ["a"]
        await wire.lapse("a")
    assert (await wire.take("w21")).jobs == []
    assert await wire.is_closed()
    assert await account(wire) == (0, 0)
    event = (await wire.events())[-1][1]
    assert event["code"] == "worker_lost"
    assert event["message"] == "given up: 20 workers took it and never began"


async def test_lost_replies_that_are_recovered_count_among_the_twenty(wire: Wire) -> None:
    await wire.enqueue()
    await wire.take("w1")
    for _ in range(19):
        assert (await wire.take("w1", recover=True)).jobs != []
    assert (await wire.take("w1", recover=True)).jobs == []
    assert await wire.is_closed()


async def test_no_number_of_releases_or_pauses_ends_a_job(wire: Wire) -> None:
    await wire.enqueue()
    seq = 0
    for i in range(25):
        [job] = (await wire.take("w1")).jobs
        await wire.look("w1", "a", job.attempt)
        if i % 2:
            await wire.lapse("a")
        else:
            assert await wire.release("w1", "drain", ("a", job.attempt)) == [DONE]
            seq += 1
    [job] = (await wire.take("w2" if seq else "w1")).jobs
    assert (job.attempt, job.seq) == (26, seq)


async def test_a_bad_neighbour_costs_a_healthy_job_one_strike(wire: Wire) -> None:
    """Both crash once together; alone, the healthy one stores a token and is cleared."""
    for job_id in ("bad", "healthy"):
        await wire.running(job_id)
    await wire.lapse("bad", "healthy")
    await wire.crash("bad", "w2")
    [job] = (await wire.take("w3", alone=True)).jobs
    assert job.id == "bad"  # the older entry; the healthy one goes to the next empty worker
    [job] = (await wire.take("w4", alone=True)).jobs
    assert (job.id, job.solo) == ("healthy", True)
    await wire.emit("w4", EmitItem("healthy", job.attempt, 1, 1, TOKEN))
    await wire.release("w4", "drain", ("healthy", job.attempt))
    [job] = (await wire.take("w5")).jobs
    assert (job.id, job.solo) == ("healthy", False)
    assert await account(wire, "healthy") == (1, 0)
