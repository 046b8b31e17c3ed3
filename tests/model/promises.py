"""Every promise, checked on what a schedule left on the server and in the hands of its readers."""

from __future__ import annotations

import json
from typing import Any, cast

from mlxq.protocol.events import decode_event, decode_result
from mlxq.protocol.keys import GROUP, LANES
from tests.model.handout import Tally, tally
from tests.model.ledger import Entry
from tests.model.plan import emitted, text_of
from tests.model.submitter import REPLAY_MS, RETENTION_MS
from tests.model.transcript import Stored, read_page, token_ids, token_text
from tests.model.world import World

LONGEST_MS = 200_000  # no schedule takes as long


def check_promises(world: World) -> list[str]:
    """Raises Violation at the first broken promise. Returns how each job ended."""
    world.hub.pump()
    ends = []
    for job in world.ledger.jobs.values():
        stored = read_page(world.client, world.keys.events(job.plan.id), "0-0", None)
        if not job.enqueued:
            world.check(not job.confirmed and not stored, f"{job.plan.id} was never created")
            continue
        record = Record(world, job, stored)
        record.check()
        ends.append(record.end)
    for reader in world.readers:
        if reader.job_id not in world.tampered:
            _check_reader(world, reader.job_id, reader.cursor.seq, reader.delivered)
    _check_keys(world)
    _check_dead(world)
    return ends


def _check_reader(world: World, job_id: str, cursor: int, delivered: list[Stored]) -> None:
    stored = world.hub.published.get(job_id, [])
    world.check(delivered == stored[cursor:], f"a reader of {job_id} saw {delivered} of {stored}")


def _check_keys(world: World) -> None:
    client, keys = world.client, world.keys
    for lane in LANES:
        key = keys.lane(lane)
        world.check(client.xlen(key) == 0, f"lane {lane} is not empty")
        groups = client.xinfo_groups(key) if client.exists(key) else []
        pending = sum(group["pending"] for group in groups if group["name"] == GROUP.encode())
        world.check(pending == 0, f"lane {lane} has {pending} pending entries")
    standing = {keys.bell, keys.dead, keys.meta, *(keys.lane(lane) for lane in LANES)}
    for name in client.scan_iter(f"{keys.tag}:*", count=1000):
        text = str(name, "ascii")
        world.check(text in standing or client.pttl(name) > 0, f"{text} would stay for ever")
    world.check(client.xlen(keys.bell) <= 1, "the bell keeps more than one entry")


def _check_dead(world: World) -> None:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", world.client.xrange(world.keys.dead))
    dead = [entry[b"id"].decode() for _, entry in entries]
    world.check(len(dead) == len(set(dead)), f"given up twice: {dead}")
    for job in world.ledger.jobs.values():
        stored = world.hub.published.get(job.plan.id, [])
        lost = bool(stored) and stored[-1].body.get("code") == "worker_lost"
        world.check(lost == (job.plan.id in dead), f"dead stream has {dead}, not {job.plan.id}")


class Record:
    """One job as the server has it at the end: hash, transcript, and what was published."""

    def __init__(self, world: World, job: Entry, stored: list[Stored]) -> None:
        self.world = world
        self.job = job
        self.id = job.plan.id
        self.stored = stored
        raw = cast("dict[bytes, bytes]", world.client.hgetall(world.keys.job(self.id)))
        self.hash = {name.decode(): value for name, value in raw.items()}
        self.last: dict[str, Any] = stored[-1].body if stored else {}

    @property
    def end(self) -> str:
        return str(self.last.get("finish_reason") or self.last.get("code"))

    def check(self) -> None:
        if self.job.tampered:
            self._check_tampered()
            return
        self._check_transcript()
        self._check_hash()
        self._check_tokens()
        self._check_attempts()
        self._check_end()
        self._check_charges()
        self._check_abort_key()
        self._check_retention()

    def _require(self, promise: bool, broken: str) -> None:
        told = [f"{event.id}:{event.json.decode()}" for event in self.stored]
        self.world.check(promise, f"{self.id}: {broken}\n{self.hash}\n{told}\n{self.job}")

    def _check_transcript(self) -> None:
        events = self.stored
        self._require(bool(events) and events[-1].terminal, "no terminal event")
        self._require(not any(event.terminal for event in events[:-1]), "two terminal events")
        self._require([e.id.seq for e in events] == list(range(1, len(events) + 1)), "seq has gaps")
        attempts = [event.id.attempt for event in events]
        self._require(attempts == sorted(attempts), "ids do not ascend")
        published = self.world.hub.published.get(self.id, [])
        self._require(published == events, f"published otherwise than stored: {published}")
        for event in events:
            known = type(decode_event(event.json)).__name__.lower()
            self._require(known == event.body["type"], f"{event} is of an unknown type")

    def _check_tampered(self) -> None:
        """The job cannot be saved; it must end, once, and leave nothing behind."""
        published = self.world.hub.published.get(self.id, [])
        ends = [event.terminal for event in published]
        self._require(ends.count(True) == 1 and ends[-1], "not exactly one end was published")
        self._require(self.hash["state"] in (b"done", b"failed"), "it never ended")

    def _check_hash(self) -> None:
        h = self.hash
        state = b"done" if self.last["type"] == "done" else b"failed"
        self._require(h.get("state") == state, "the state is not that of the terminal event")
        self._require("owner" not in h, "a finished job has an owner")
        self._require(int(h["attempt"]) == self.job.attempt, "the hash has another attempt")
        self._require(int(h["seq"]) == len(self.stored), "seq is not the number of events")
        self._require(json.loads(h["terminal"]) == self.last, "the hash has another terminal")
        self._require(int(h["finished"]) >= int(h["created"]), "it finished before its creation")

    def _check_tokens(self) -> None:
        plan, ids = self.job.plan, token_ids(self.stored)
        text = token_text(self.stored)
        self._require(ids == plan.ids(len(ids)), f"tokens {ids} are not those of the job")
        self._require(int(self.hash["tokens"]) == len(ids), "tokens are not counted right")
        if self.end == "length":
            result = decode_result(self.hash["result"])
            self._require(len(ids) == plan.length, "a natural end without all tokens")
            self._require(result.token_ids == ids, "the result has other ids")
            self._require(text == result.text == text_of(ids), "the text is not that of the ids")
        else:
            self._require(len(ids) < plan.length, "complete, but not ended by FINISH")
            self._require(text == emitted(ids), "a live job's text is not that of its ids")
            self._require(not self.hash.get("result"), "a result without a natural end")

    def _check_attempts(self) -> None:
        """Each attempt opens once, by the worker that was given it, before all else it says."""
        opened: set[int] = set()
        for event in self.stored:
            kind, attempt = event.body["type"], event.id.attempt
            if kind in ("started", "resumed"):
                owner = self.job.handouts[attempt].owner
                self._require(event.body["worker"] == owner, f"{event} is not of {owner}")
                self._require(event.body["attempt"] == attempt, f"{event} has a wrong attempt")
                self._require(attempt not in opened, f"attempt {attempt} opened twice")
                opened.add(attempt)
                first = event.id.seq == 1
                self._require((kind == "started") == first, f"{kind} in the wrong place")
            elif kind == "token":
                self._require(attempt in opened, f"{event} comes before its attempt opened")

    def _check_end(self) -> None:
        plan, job, finished = self.job.plan, self.job, self.job.finish is not None
        self._require(
            finished == (self.end in ("length", "bad_request")), "ended by the wrong side"
        )
        if plan.kind == "bad":
            self._require(self.end != "length", "a bad job ended well")
        if plan.poison:
            self._require(self.end != "length", "a poison job ended well")
        if job.finish is not None:
            seq, _, events, _ = job.finish
            sent = [json.loads(event) for event in events]
            tail = [event.body for event in self.stored[seq - 1 :]]
            self._require(tail == sent, "FINISH stored something else")
            self._require(self.hash["by"].decode() == f"{self._owner}/{job.attempt}", "by is wrong")
        allowed = {"length"} if plan.kind == "good" else set()
        allowed |= {"bad_request"} if plan.kind == "bad" else set()
        allowed |= {"aborted"} if job.doomed is not None or job.aborted else set()
        allowed |= {"deadline_exceeded"} if plan.deadline_ms else set()
        allowed |= {"worker_lost"} if self._may_be_lost() else set()
        self._require(self.end in allowed, f"{self.end} is none of {allowed}")
        if job.aborted:
            self._require(self.end == "aborted", "ABORT said closed")
        if job.doomed is not None:
            late = len(self.stored) - (len(job.finish[2]) if job.finish else 1)
            self._require(late == job.doomed, f"went on after the abort key at {job.doomed}")
        if job.finish is None:
            count = self.last["usage"]["completion_tokens"]
            self._require(count == int(self.hash["tokens"]), "the end counts other tokens")
            self._require(self.last["attempts"] == job.attempt, "the end counts other attempts")
        if self.end == "deadline_exceeded":
            early = int(self.hash["finished"]) < int(self.hash["deadline"])
            self._require(not early, "expired before its deadline")

    @property
    def _owner(self) -> str:
        return self.job.handouts[self.job.attempt].owner

    def _may_be_lost(self) -> bool:
        """Whether section 8 lets this job be given up."""
        if self._innocent:
            return False
        (_, crashes), (_, strikes), unheard = self._tally()
        evidence = crashes >= 3 and strikes >= 2
        return evidence or crashes >= self.world.max_crashes or unheard >= 20

    def _tally(self) -> Tally:
        handouts = list(self.job.handouts.values())
        if handouts:
            handouts[-1].last(self.end == "worker_lost")
        return tally(handouts)

    @property
    def _innocent(self) -> bool:
        """A healthy job beside poison that shows before the first token, all owners in time.

        A neighbour that dies later, again and again, may take it along: only its crashes count.
        """
        mix, kinds = self.world.mix, {plan.kind for plan in self.world.plans.values()}
        quiet = not (mix.kill or mix.pause or mix.cut or mix.engine_dies or mix.late)
        told = not self.world.stalled and "stubborn" not in kinds
        return quiet and told and not self.job.plan.poison

    def _check_charges(self) -> None:
        counted = self._tally()
        for name, (least, most) in (("crashes", counted.crashes), ("strikes", counted.strikes)):
            count = int(self.hash.get(name) or 0)
            self._require(least <= count <= most, f"{count} {name}, should be {least} to {most}")

    def _check_abort_key(self) -> None:
        """The terminal event consumed the key, unless it was set afterwards."""
        left = self.world.client.exists(self.world.keys.abort(self.id))
        self._require(not left or self.id in self.world.late_keys, "the abort key was not consumed")

    def _check_retention(self) -> None:
        """A result replaces the transcript, which then may go sooner."""
        client, keys = self.world.client, self.world.keys
        kept = REPLAY_MS if self.job.finish else RETENTION_MS
        for key, kept_ms in ((keys.job(self.id), RETENTION_MS), (keys.events(self.id), kept)):
            left_ms = int(client.pttl(key))
            self._require(kept_ms - LONGEST_MS < left_ms <= kept_ms, f"{key} has {left_ms} ms left")
