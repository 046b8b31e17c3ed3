"""What must hold when a round has settled: every job, every reader, every key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mlxq.protocol.errors import JobFailed, MlxqError
from mlxq.protocol.events import (
    Done,
    Event,
    EventId,
    Failed,
    Token,
    Unknown,
    decode_event,
    decode_result,
)
from mlxq.protocol.keys import GROUP, LANES
from ops.lib.soak.load import Reading, Submitted
from ops.lib.soak.news import Violation
from ops.lib.soak.plan import ENDLESS, JobPlan
from ops.lib.soak.world import World
from ops.lib.synthetic import answer

MOST_UNLUCKY = 2  # innocent jobs given up in a round; see `is_unlucky`

Stored = list[tuple[bytes, dict[bytes, bytes]]]


async def check_round(world: World, jobs: Sequence[Submitted]) -> None:
    """Raises Violation at the first promise that does not hold."""
    ends = {job.plan.id: await _check_job(world, job) for job in jobs}
    await _check_results(world, jobs)
    await check_keys(world)
    await _check_dead(world, jobs, ends)
    await _check_subscriptions(world)


async def _check_job(world: World, job: Submitted) -> str:
    """How it ended; empty: it never was."""
    keys, client = world.keys_of(job.plan.id), world.client
    pipeline = client.pipeline(transaction=False)
    pipeline.hgetall(keys.job(job.plan.id))
    pipeline.xrange(keys.events(job.plan.id))
    fields, entries = await pipeline.execute()
    try:
        if not fields and not job.confirmed:
            _require(not entries, "events of a job that never was")
            return ""
        events = read_transcript(entries)
        check_events(job.plan, events, withdrawn=bool(job.refused))
        check_hash(job.plan, fields, events)
        _check_abort(job, fields)
        for reading in job.readings:
            check_reading(reading, events)
    except Violation as broken:
        told = "\n".join(f"    {name.decode()} {body[b'e']!r:.300}" for name, body in entries)
        raise Violation(f"{job.plan.id}: {broken}\n{job}\n{fields}\n{told}") from None
    news = world.news
    news.counts["jobs"] += 1
    news.counts["attempts"] += events[-1].attempts  # type: ignore[union-attr]
    news.counts["events"] += len(events)
    news.counts["tokens"] += len(token_ids(events))
    news.counts["readers"] += len(job.readings)
    news.ends[end_of(events[-1])] += 1
    return end_of(events[-1])


def _require(promise: object, broken: str) -> None:
    if not promise:
        raise Violation(broken)


def _require_same(what: str, found: Sequence[Any], right: Sequence[Any]) -> None:
    if found == right:
        return
    pairs = enumerate(zip(found, right, strict=False))
    first = next((index for index, (a, b) in pairs if a != b), min(len(found), len(right)))
    near = slice(max(0, first - 2), first + 5)
    raise Violation(
        f"{what}: {len(found)} where {len(right)} are right; from {near.start} on "
        f"{found[near]!r}, not {right[near]!r}"
    )


def read_transcript(entries: Stored) -> list[Event]:
    """The stored events, each with its id."""
    events = []
    for name, body in entries:
        event = decode_event(body[b"e"], name.decode())
        _require(not isinstance(event, Unknown), f"an event of an unknown type: {event}")
        assert not isinstance(event, Unknown)
        events.append(event)
    return events


def token_ids(events: Sequence[Event]) -> list[int]:
    return [number for event in events if isinstance(event, Token) for number in event.ids]


def end_of(event: Event) -> str:
    """How a job ended: its finish reason or its failure's code; empty: not at all."""
    if isinstance(event, Done):
        return event.finish_reason
    return event.code if isinstance(event, Failed) else ""


def check_events(plan: JobPlan, events: Sequence[Event], *, withdrawn: bool = False) -> None:
    """The transcript of a job: one end, no gap, no duplicate, the answer and nothing else.

    `withdrawn`: a submit of it went unanswered, and the producer has aborted it.
    """
    _require(events, "no events")
    ends = [end_of(event) for event in events]
    _require(ends[-1], "no terminal event")
    _require(not any(ends[:-1]), "more than one terminal event")
    ids = [EventId.parse(event.id) for event in events]
    _require([each.seq for each in ids] == list(range(1, len(ids) + 1)), "a gap in seq")
    _require(ids == sorted(ids), "ids do not ascend")
    _require(ends[-1] in _allowed(plan, events, withdrawn), f"it must not end as {ends[-1]}")
    tokens = token_ids(events)
    text = "".join(event.text for event in events if isinstance(event, Token))
    _require_same("the tokens", tokens, answer(plan.id, len(tokens)))
    if ends[-1] in ("stop", "length"):
        _require_same("the text", text, plan.text)
        stopped = plan.stop is not None and len(tokens) <= plan.tokens
        _require(len(tokens) == plan.tokens or stopped, f"{len(tokens)} tokens")
    elif plan.tokens < ENDLESS:
        _require_same("the text", text, plan.text[: len(text)])


def _allowed(plan: JobPlan, events: Sequence[Event], withdrawn: bool) -> set[str]:
    allowed = set()
    if plan.fault == "poison" or is_unlucky(events):
        allowed.add("worker_lost")
    if plan.fault != "poison" and plan.tokens < ENDLESS:
        allowed |= {"length", "stop"} if plan.stop else {"length"}
    if plan.abort_s is not None or withdrawn:
        allowed.add("aborted")
    if plan.deadline_s is not None:
        allowed.add("deadline_exceeded")
    return allowed


def is_unlucky(events: Sequence[Event]) -> bool:
    """Whether three workers can have crashed with an innocent job of which at least the last two
    had stored no token: nothing tells it from poison, so it may be given up."""
    attempts = EventId.parse(events[-1].id).attempt
    spoke = [EventId.parse(event.id).attempt for event in events if isinstance(event, Token)]
    return attempts >= 3 and attempts - max(spoke, default=0) >= 2


def check_hash(plan: JobPlan, fields: dict[bytes, bytes], events: Sequence[Event]) -> None:
    """The job hash agrees with the transcript."""
    terminal = events[-1]
    state = b"done" if isinstance(terminal, Done) else b"failed"
    _require(fields.get(b"state") == state, "the state is not that of the terminal event")
    _require(int(fields[b"seq"]) == len(events), "seq is not the number of events")
    _require(int(fields[b"tokens"]) == len(token_ids(events)), "tokens are miscounted")
    _require(b"owner" not in fields, "an owner is left")
    kept = decode_event(fields[b"terminal"], terminal.id)
    _require(kept == terminal, "`terminal` is another event")
    by_worker = bool(fields[b"by"])
    _require(by_worker or end_of(terminal) not in ("stop", "length"), "nobody finished it")
    if end_of(terminal) == "deadline_exceeded":
        early = int(fields[b"finished"]) < int(fields[b"deadline"])
        _require(not early, "it failed before its deadline")
    if b"result" in fields:
        result = decode_result(fields[b"result"])
        _require(result.token_ids == token_ids(events), "the result has other tokens")
        _require_same("the text of the result", result.text, plan.text)


def _check_abort(job: Submitted, fields: dict[bytes, bytes]) -> None:
    if job.aborted == "aborted":
        _require(b'"aborted"' in fields[b"terminal"], "abort said aborted, and it ended otherwise")
    _require(job.aborted != "unknown", "abort did not know a job that was submitted")


def check_reading(reading: Reading, events: Sequence[Event]) -> None:
    """A reader was given every event once and in order, over all its visits."""
    _require(not reading.error, f"{reading.plan} got {reading.error}")
    given = [event.id for event in reading.events]
    right = [event.id for event in events]
    _require_same(f"what {reading.plan} was given", given, right)
    _require(reading.events == list(events), f"{reading.plan} was given other events")


async def _check_results(world: World, jobs: Sequence[Submitted]) -> None:
    """`result` gives the same as the stream, asked for in another place afterwards."""
    for index, job in enumerate(jobs):
        read = [reading for reading in job.readings if reading.events]
        if index % 10 or not read:
            continue
        events = read[0].events
        producer = world.producers[index // 10 % len(world.producers)]
        try:
            result = await producer.attach(job.plan.id).result(timeout=30)
        except JobFailed as failure:
            _require(failure.code == end_of(events[-1]), f"{job.plan.id}: result raised {failure}")
            continue
        except (MlxqError, TimeoutError) as error:
            raise Violation(f"{job.plan.id}: result raised {error!r}") from None
        _require(result.finish_reason == end_of(events[-1]), f"{job.plan.id}: {result}")
        _require_same(f"the result of {job.plan.id}", result.token_ids, token_ids(events))


async def check_keys(world: World) -> None:
    """Nothing is left on the lanes, and nothing that would stay for ever."""
    client = world.client
    for keys in world.shards:
        for lane in LANES:
            await _check_lane(world, keys.lane(lane))
        _require(await client.xlen(keys.bell) <= 1, "the bell keeps more than one entry")
    for name in await all_keys(world):
        if name not in _standing(world):
            left_ms = await client.pttl(name)
            _require(left_ms != -1, f"{name} would stay for ever")


async def _check_lane(world: World, key: str) -> None:
    client = world.client
    _require(await client.xlen(key) == 0, f"{key} is not empty")
    groups: list[dict[str, Any]] = []
    if await client.exists(key):
        groups = await client.xinfo_groups(key)
    pending = sum(group["pending"] for group in groups if group["name"] == GROUP.encode())
    _require(pending == 0, f"{key} has {pending} pending entries")


async def all_keys(world: World) -> list[str]:
    return [name.decode() async for name in world.client.scan_iter("*", count=1_000)]


def _standing(world: World) -> set[str]:
    standing = set()
    for keys in world.shards:
        standing |= {keys.bell, keys.dead, keys.meta, *(keys.lane(lane) for lane in LANES)}
    return standing


async def _check_dead(world: World, jobs: Sequence[Submitted], ends: dict[str, str]) -> None:
    """The dead letters are the jobs that ended so, each once; few are innocent. They are purged."""
    letters = [letter.id for letter in await world.producers[-1].dead.all()]
    ended = [job_id for job_id, end in ends.items() if end == "worker_lost"]
    _require(sorted(letters) == sorted(ended), f"dead letters {letters} of {ended}")
    poison = {job.plan.id for job in jobs if job.plan.fault == "poison"}
    innocent = set(letters) - poison
    world.news.counts["innocents given up"] += len(innocent)
    world.news.remark([line for job_id in innocent for line in await _story(world, job_id)])
    _require(len(innocent) <= MOST_UNLUCKY, f"innocents were given up: {innocent}")
    await world.producers[-1].dead.purge()


async def _story(world: World, job_id: str) -> list[str]:
    """Who had the job, and what became of it."""
    keys, lines = world.keys_of(job_id), [f"{job_id} is innocent, and was given up"]
    fields = await world.client.hmget(keys.job(job_id), ["created", "finished", "crashes"])
    lines.append(f"created, finished, crashes: {fields}")
    entries: Any = await world.client.xrange(keys.events(job_id))
    lines += [f"    {name.decode()} {body}" for name, body in entries if 'token"' not in str(body)]
    return lines


async def _check_subscriptions(world: World) -> None:
    """No producer is still subscribed to a job: readers that left have let go."""
    for _ in range(60):
        found: list[Any] = await world.client.pubsub_channels("*")
        keepalives = {keys.keepalive for keys in world.shards}
        left = [name for name in found if name.decode() not in keepalives]
        if not left:
            return
        await asyncio.sleep(0.25)
    raise Violation(f"still subscribed: {left}")


async def pass_time(world: World) -> None:
    """As if retention had passed: what has a time to live goes, and nothing else is left."""
    pipeline = world.client.pipeline(transaction=False)
    for name in await _passing(world):
        pipeline.pexpire(name, 1, xx=True)
    await pipeline.execute()
    await asyncio.sleep(0.05)
    left = await _passing(world)
    _require(not left, f"left behind for ever: {left}")


async def _passing(world: World) -> list[str]:
    """All keys but those that stand, and what the workers say of themselves."""
    standing = _standing(world)
    presence = tuple(name for keys in world.shards for name in (keys.worker(""), keys.workers))
    return [
        name
        for name in await all_keys(world)
        if name not in standing and not name.startswith(presence)
    ]
