"""The wire format: these values are exactly these bytes, and come back from them.

A change of a golden file is a change of the protocol: old workers and submitters must read it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxq.protocol.events import (
    Done,
    Failed,
    Requeued,
    decode_event,
    decode_result,
    encode_event,
    encode_result,
)
from mlxq.protocol.jobs import decode_job, encode_job
from mlxq.protocol.scripts import ReleaseReason
from tests.protocol.golden_values import EVENTS, JOBS, RESULTS
from tests.protocol.wire import Wire

FOLDER = Path(__file__).parent / "golden"


def golden(name: str) -> bytes:
    return (FOLDER / f"{name}.json").read_bytes().removesuffix(b"\n")


@pytest.mark.parametrize("name", EVENTS)
def test_events(name: str) -> None:
    assert encode_event(EVENTS[name]) == golden(name)
    assert decode_event(golden(name)) == EVENTS[name]


@pytest.mark.parametrize("name", JOBS)
def test_jobs(name: str) -> None:
    assert encode_job(JOBS[name]) == golden(name)
    assert decode_job(golden(name)) == JOBS[name]


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    assert encode_result(RESULTS[name]) == golden(name)
    assert decode_result(golden(name)) == RESULTS[name]


def test_every_file_is_checked() -> None:
    names = {path.stem for path in FOLDER.iterdir()}
    assert names == {*EVENTS, *JOBS, *RESULTS, "script_events"}


async def test_events_written_by_scripts(wire: Wire) -> None:
    """The scripts write JSON of their own: its bytes, and what our types read from it."""
    written: dict[str, bytes] = {}

    async def keep(name: str, job_id: str) -> None:
        [(_, fields)] = (await wire.client.xrange(wire.keys.events(job_id)))[-1:]
        written[name] = fields[b"e"]

    reasons: list[ReleaseReason] = ["drain", "preempt", "crash"]
    for reason in reasons:
        await wire.running(reason, tokens=1)
        await wire.release("w1", reason, (reason, 1))
        await keep(f"requeued_{reason}", reason)
        await wire.abort(reason)
    await keep("aborted", "crash")
    await wire.running("late", tokens=2)
    await wire.pass_deadline("late")
    await wire.look("w1", "late")
    await keep("deadline_exceeded", "late")
    await wire.running("broken", tokens=1)
    await wire.command("XADD", wire.keys.events("broken"), "1-9", "e", "{}")
    await wire.finish("w1", "broken", seq=2)
    await keep("internal", "broken")
    await wire.running("dead", tokens=1)
    await wire.command("HSET", wire.keys.job("dead"), "crashes", 9)
    await wire.lapse("dead")
    await wire.take("w2")
    await keep("worker_lost", "dead")

    wanted: dict[str, str] = json.loads(golden("script_events"))
    assert {name: data.decode() for name, data in written.items()} == wanted
    kinds = {name: type(decode_event(data)) for name, data in written.items()}
    assert kinds == {
        "requeued_drain": Requeued,
        "requeued_preempt": Requeued,
        "requeued_crash": Requeued,
        "aborted": Done,
        "deadline_exceeded": Failed,
        "internal": Failed,
        "worker_lost": Failed,
    }
