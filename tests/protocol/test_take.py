"""TAKE: which job goes to whom, in which order, and what is cleared away on the walk."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from mlxq.protocol.keys import GROUP, LANES
from mlxq.protocol.scripts import DONE, FENCED, Taken, run
from tests.protocol.wire import LEASE_MS, SPEC, Wire


async def test_hands_out_and_records(wire: Wire) -> None:
    await wire.enqueue()
    take = await wire.take("w1", 4)
    assert take.jobs == [Taken("a", 1, 0, 0, False, SPEC)]
    assert (take.more, take.make_room) == (False, False)
    job = await wire.job()
    assert {
        name: job[name] for name in ("state", "attempt", "owner", "lease", "begun", "base")
    } == {
        "state": "running",
        "attempt": "1",
        "owner": "w1",
        "lease": str(LEASE_MS),
        "begun": "",
        "base": "0",
    }
    assert int(job["taken"]) >= int(job["created"])
    assert [holder for holder, _ in await wire.holders()] == ["w1"]
    assert await wire.events() == []


async def test_an_empty_queue_gives_the_bell_to_wait_on(wire: Wire) -> None:
    assert (await wire.take()).bell_id == "0-0"
    await wire.enqueue()
    bell_id = (await wire.take()).bell_id
    [(entry, _)] = await wire.client.xrange(wire.keys.bell)
    assert bell_id == entry.decode()


async def test_never_more_than_asked(wire: Wire) -> None:
    for i in range(5):
        await wire.enqueue(f"j{i}")
    assert await wire.take_ids(n=3) == ["j0", "j1", "j2"]
    assert len(await wire.holders()) == 3
    assert await wire.take_ids(n=3) == ["j3", "j4"]


async def test_lanes_high_to_low_and_in_order_within(wire: Wire) -> None:
    for lane in reversed(LANES):
        await wire.enqueue(f"{lane}1", lane)
        await wire.enqueue(f"{lane}2", lane)
    assert await wire.take_ids(n=6) == ["high1", "high2", "normal1", "normal2", "low1", "low2"]


async def test_every_8th_job_comes_from_the_lowest_lane(wire: Wire) -> None:
    for i in range(20):
        await wire.enqueue(f"high{i}", "high")
    for i in range(3):
        await wire.enqueue(f"low{i}", "low")
    taken = [(await wire.take_ids(f"w{i % 3}"))[0] for i in range(17)]
    assert [i for i, job_id in enumerate(taken, start=1) if job_id.startswith("low")] == [8, 16]


async def test_a_job_comes_with_its_lane_and_one_whose_turn_has_come_as_a_high_one(
    wire: Wire,
) -> None:
    """In its worker it would wait for those it has passed; it is not to be parked for them."""
    for lane in LANES:
        await wire.enqueue(f"{lane}1", lane)
        await wire.enqueue(f"{lane}2", lane)
    first = await wire.take("w1", 5)
    assert [(job.id, job.lane) for job in first.jobs] == [
        *(("high1", "high"), ("high2", "high"), ("normal1", "normal"), ("normal2", "normal")),
        ("low1", "low"),
    ]
    await wire.enqueue("low3", "low")
    # The 8th, but it passes nobody.
    assert [(job.id, job.lane) for job in (await wire.take("w1", 3)).jobs] == [
        ("low2", "low"),
        ("low3", "low"),
    ]
    await wire.enqueue("low4", "low")
    await wire.enqueue("high3", "high")
    assert [(job.id, job.lane) for job in (await wire.take()).jobs] == [("low4", "high")]


async def test_a_take_of_the_higher_lanes_alone(wire: Wire) -> None:
    for lane in LANES:
        await wire.enqueue(f"{lane}1", lane)
    assert await wire.take_ids(n=4, lanes=1) == ["high1"]
    assert await wire.take_ids(n=4, lanes=2) == ["normal1"]
    assert await wire.take_ids(n=4, lanes=2) == []
    await wire.lapse("high1", "normal1")
    assert await wire.take_ids("w2", n=4, lanes=1) == ["high1"]
    assert await wire.take_ids("w2", n=4) == ["normal1", "low1"]


async def test_a_take_of_the_higher_lanes_takes_no_turn_from_the_lowest(wire: Wire) -> None:
    for i in range(20):
        await wire.enqueue(f"high{i}", "high")
        await wire.enqueue(f"low{i}", "low")
    assert len(await wire.take_ids(n=7)) == 7
    assert await wire.take_ids(n=2, lanes=1) == ["high7", "high8"]
    assert await wire.take_ids() == ["low0"]


async def test_a_take_of_the_higher_lanes_brings_back_what_was_lost(wire: Wire) -> None:
    await wire.enqueue("a", "low")
    assert await wire.take_ids("w1") == ["a"]  # and the reply is lost
    assert await wire.take_ids("w1", recover=True, lanes=1) == ["a"]


async def test_aging_counts_jobs_and_not_calls(wire: Wire) -> None:
    for i in range(40):
        await wire.enqueue(f"high{i}", "high")
        await wire.enqueue(f"low{i}", "low")
    sizes = [5, 5, 16, 1, 5]
    lows = [sum(job_id.startswith("low") for job_id in await wire.take_ids(n=n)) for n in sizes]
    assert lows == [0, 1, 2, 0, 1]


async def test_aging_takes_the_lowest_lane_that_has_a_job(wire: Wire) -> None:
    for i in range(8):
        await wire.enqueue(f"high{i}", "high")
    await wire.enqueue("normal", "normal")
    taken = [(await wire.take_ids())[0] for _ in range(9)]
    assert taken.index("normal") == 7


async def test_lapsed_and_released_jobs_before_new_ones(wire: Wire) -> None:
    await wire.running("lapsed", tokens=1)
    await wire.running("released", tokens=1)
    await wire.enqueue("new")
    await wire.lapse("lapsed")
    await wire.release("w1", "drain", ("released", 1))
    assert await wire.take_ids("w2", 3) == ["lapsed", "released", "new"]


async def test_a_new_job_of_a_higher_lane_before_a_lapsed_one(wire: Wire) -> None:
    await wire.running("lapsed", tokens=1)
    await wire.lapse("lapsed")
    await wire.enqueue("new", "high")
    assert await wire.take_ids("w2", 2) == ["new", "lapsed"]


async def test_a_job_within_its_lease_stays(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a", idle_ms=LEASE_MS // 2)
    assert await wire.take_ids("w2") == []
    assert await wire.look() == DONE


async def test_the_lease_of_the_holder_counts(wire: Wire) -> None:
    """A worker with a short lease must not take from one with a long lease."""
    await wire.running(tokens=1)
    await wire.lapse("a", idle_ms=LEASE_MS - 1_000)
    assert (await wire.take("w2", lease_ms=1_000)).jobs == []
    await wire.lapse("a", idle_ms=LEASE_MS + 1_000)
    assert [job.id for job in (await wire.take("w2", lease_ms=1_000)).jobs] == ["a"]


async def test_a_lapsed_job_is_resumed_and_its_owner_fenced(wire: Wire) -> None:
    await wire.running(tokens=2)
    await wire.lapse("a")
    [job] = (await wire.take("w2")).jobs
    assert job == Taken("a", 2, 2, 2, False, SPEC)
    assert (await wire.job())["base"] == "2"
    assert await wire.look("w1", "a", 1) == FENCED
    assert await wire.event_ids() == ["1-1", "1-2"]
    assert await wire.look("w2", "a", 2) == DONE


async def test_a_pending_list_of_several_pages_is_walked_to_its_end(wire: Wire) -> None:
    ids = [f"j{i}" for i in range(150)]
    for job_id in ids:
        await wire.enqueue(job_id)
    assert await wire.take_ids("w1", 150) == ids
    await wire.lapse(ids[149])
    assert await wire.take_ids("w2") == [ids[149]]


async def test_a_transcript_without_events_is_removed(wire: Wire) -> None:
    """Left over from an earlier job of that id; its ids would refuse those of this one."""
    await wire.command("XADD", wire.keys.events("a"), "9-9", "e", "{}")
    await wire.enqueue()
    await wire.take()
    assert await wire.events() == []


async def test_gate_on_the_way(wire: Wire) -> None:
    for job_id in ("aborted", "late", "good"):
        await wire.enqueue(job_id)
    await wire.ask_abort("aborted")
    await wire.pass_deadline("late")
    assert await wire.take_ids() == ["good"]
    assert await wire.is_closed("aborted") and await wire.is_closed("late")
    [(event_id, event)] = await wire.events("aborted")
    assert event_id == "0-1"
    assert event == {
        "type": "done",
        "finish_reason": "aborted",
        "attempts": 0,
        "usage": {"completion_tokens": 0},
    }
    [(event_id, event)] = await wire.events("late")
    assert (event_id, event["type"], event["code"]) == ("0-1", "failed", "deadline_exceeded")


async def test_entries_of_missing_and_finished_jobs_are_dropped(wire: Wire) -> None:
    for job_id in ("missing", "done", "moved", "good"):
        await wire.enqueue(job_id)
    await wire.command("DEL", wire.keys.job("missing"))
    await wire.command("HSET", wire.keys.job("done"), "state", "done")
    await wire.command("HSET", wire.keys.job("moved"), "entry", "1-1")
    await wire.command("XADD", wire.keys.lane("normal"), "*", "other", "field")
    assert await wire.take_ids(n=5) == ["good"]
    assert await wire.queued() == ["good"]
    assert len(await wire.holders()) == 1


async def test_a_pending_entry_that_was_deleted_is_dropped(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a")
    [entry] = await wire.fields("a", "entry")
    await wire.command("XDEL", wire.keys.lane("normal"), entry)
    assert await wire.take_ids("w2") == []
    assert await wire.holders() == []


async def test_a_missing_group_is_made_inside(wire: Wire) -> None:
    await wire.enqueue("a")
    assert await wire.take_ids() == ["a"]
    await wire.enqueue("b")
    for lane in LANES:
        assert await wire.client.xinfo_groups(wire.keys.lane(lane))
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), GROUP)
    assert await wire.take_ids("w2", 2) == ["a", "b"]


async def test_a_lost_group_charges_nobody(wire: Wire) -> None:
    await wire.running("a", tokens=1)
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), GROUP)
    assert await wire.beat("w1", ("a", 1)) == [DONE]
    [job] = (await wire.take("w2")).jobs
    assert (job.id, job.attempt, job.seq) == ("a", 2, 1)
    assert await wire.fields("a", "crashes", "strikes", "silent") == ["0", "0", "0"]
    assert await wire.look("w1", "a", 1) == FENCED


async def test_an_error_of_another_kind_is_not_swallowed(wire: Wire) -> None:
    await wire.command("SET", wire.keys.lane("high"), "not a stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await wire.take()


async def test_recover_hands_out_again_what_a_lost_reply_took(wire: Wire) -> None:
    await wire.enqueue("a")
    await wire.enqueue("b")
    await wire.take("w1", 2)
    await wire.look("w1", "b", 1)
    assert await wire.take_ids("w1", 2) == []
    take = await wire.take("w1", 2, recover=True)
    assert [(job.id, job.attempt) for job in take.jobs] == [("a", 2)]
    assert await wire.fields("a", "crashes", "strikes") == ["0", "0"]
    assert await wire.look("w1", "a", 2) == DONE
    assert await wire.look("w1", "b", 1) == DONE


async def test_recover_touches_only_our_own(wire: Wire) -> None:
    await wire.enqueue()
    await wire.take("w1")
    assert (await wire.take("w2", recover=True)).jobs == []
    assert await wire.look("w1") == DONE


async def test_recover_keeps_to_n(wire: Wire) -> None:
    for i in range(3):
        await wire.enqueue(f"j{i}")
    await wire.take("w1", 3)
    assert len((await wire.take("w1", 2, recover=True)).jobs) == 2


async def test_recover_gates(wire: Wire) -> None:
    await wire.enqueue()
    await wire.take("w1")
    await wire.ask_abort()
    assert (await wire.take("w1", recover=True)).jobs == []
    assert await wire.is_closed()


async def test_our_own_job_comes_back_to_us_as_a_new_attempt(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    [job] = (await wire.take("w1")).jobs
    assert (job.attempt, job.seq) == (2, 1)
    assert await wire.fields("a", "crashes", "strikes") == ["0", "0"]
    assert await wire.look("w1", "a", 1) == FENCED


async def test_a_thousand_entries_and_then_more(wire: Wire) -> None:
    pipeline = wire.client.pipeline(transaction=False)
    for i in range(1_100):
        call = wire.scripts.enqueue(f"j{i}", SPEC)
        pipeline.eval(call.script.source, 1, call.key, *call.args)
        pipeline.set(wire.keys.abort(f"j{i}"), 1, ex=3600)
    await pipeline.execute()
    await wire.enqueue("good")
    take = await wire.take(n=2)
    assert (take.jobs, take.more) == ([], True)
    assert len(await wire.queued()) == 101
    take = await wire.take(n=2)
    assert ([job.id for job in take.jobs], take.more) == (["good"], False)
    assert await wire.queued() == ["good"]


async def test_what_cannot_be_taken_now_neither_hides_new_jobs_nor_asks_for_more(
    wire: Wire,
) -> None:
    """A thousand jobs under a longer lease than ours: looking at them again at once is no use."""
    ids = [f"j{i}" for i in range(800)]
    for job_id in ids:
        await wire.enqueue(job_id)
    await wire.take("w1", 800)
    pipeline = wire.client.pipeline(transaction=False)
    lane = wire.keys.lane("normal")
    for entry, _ in await wire.client.xrange(lane):
        pipeline.xclaim(lane, GROUP, "w1", 0, [entry], idle=5_000, justid=True)
    await pipeline.execute()
    await wire.enqueue("new")
    take = await wire.take("w2", 2, lease_ms=1_000)
    assert ([job.id for job in take.jobs], take.more) == (["new"], False)


@pytest.mark.parametrize("args", [(), ("w1", 0, 1, 0, 0, 10), ("w1", 1, 0, 0, 0, 10), ("w1", 1)])
async def test_wrong_arguments_are_told(wire: Wire, args: tuple[str | int, ...]) -> None:
    call = wire.scripts.take("w1", 1, lease_ms=1)
    with pytest.raises(ResponseError, match="expected pub owner n lease_ms"):
        await wire.command("EVAL", call.script.source, 1, call.key, "PUBLISH", *args)


async def test_a_take_that_runs_twice_strands_nothing(wire: Wire) -> None:
    """The first reply is lost; recover finds the job although another TAKE came between."""
    await wire.enqueue()
    call = wire.scripts.take("w1", 1, lease_ms=LEASE_MS)
    await run(wire.client, call)
    await run(wire.client, call)
    assert await wire.take_ids("w1", recover=True) == ["a"]
