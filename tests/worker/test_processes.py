"""Real worker processes on a real server: killed, frozen, drained; no token lost or doubled."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from mlxq.producer import Producer
from tests.server import Server
from tests.worker.harness import Submitter, check_stream, text_of
from tests.worker.processes import START_S, WorkerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Prefill and decode differ in the last bits of a float, which decides a draw that is nearly a tie.
# With these seeds no draw of the twenty jobs is: noise of 2e-4 on the logits changes none of them.
SEEDS = (40, 2, 164, 446, 208, 770, 372, 294, 656, 178)

Start = Callable[..., WorkerProcess]


@pytest.fixture
def worker(server: Server, queue: str, tiny_model: Path, tmp_path: Path) -> Start:
    """Makes worker processes on the tiny model."""

    def make(name: str, *flags: str, on: str = queue) -> WorkerProcess:
        log = tmp_path / f"{name}.log"
        return WorkerProcess(str(tiny_model), server.url, on, name, log, *flags)

    return make


async def _read(producer: Producer, job_id: str) -> list[str]:
    """Follows a job to its end as a web app would; returns the ids of all events it was given."""
    return [event.id async for event in producer.attach(job_id).events()]


async def test_twenty_jobs_over_two_workers_that_are_killed_three_times_each(
    server: Server, queue: str, client: Redis, worker: Start
) -> None:
    jobs: dict[str, dict[str, Any]] = {
        f"job{n}": {"prompt": f"{n} the fox", "max_tokens": 200 + 5 * n, "ignore_eos": True}
        | ({"temperature": 0} if n % 2 else {"seed": SEEDS[n // 2]})
        for n in range(20)
    }
    calm = Submitter(client, f"{queue}-calm")
    with worker("calm", "--max-batch", "8", on=f"{queue}-calm") as alone:
        alone.wait_serving()
        for job_id, fields in jobs.items():
            await calm.enqueue(job_id, **fields)
        for job_id in jobs:
            await calm.terminal(job_id, 120)
    stormy = Submitter(client, queue)
    flags = ("--max-batch", "4", "--lease-s", "1")
    with worker("one", *flags) as one, worker("two", *flags) as two:
        async with Producer(server.url, queue=queue) as producer:
            for job_id, fields in jobs.items():
                await stormy.enqueue(job_id, **fields)
            readers = [asyncio.create_task(_read(producer, job_id)) for job_id in jobs]
            for victim in (one, two) * 3:
                await asyncio.to_thread(victim.wait_serving)
                await _some_progress(stormy, list(jobs))
                victim.kill()
                victim.start()
            read = await asyncio.wait_for(asyncio.gather(*readers), 180)
    attempts = 0
    for job_id, seen in zip(jobs, read, strict=True):
        events = await stormy.events(job_id)
        undisturbed = await calm.events(job_id)
        assert check_stream(events) == check_stream(undisturbed), job_id
        assert text_of(events) == text_of(undisturbed), job_id
        assert seen == [event["id"] for event in events], job_id
        attempts += sum(event["type"] == "resumed" for event in events)
    assert attempts > 0, "no job was interrupted: the test showed nothing"


async def _some_progress(submitter: Submitter, job_ids: list[str], tokens: int = 60) -> None:
    """Returns once so many more tokens are stored, or all jobs are done."""

    async def stored() -> tuple[int, bool]:
        jobs = [await submitter.job(job_id) for job_id in job_ids]
        done = all(job["state"] in ("done", "failed") for job in jobs)
        return sum(int(job.get("tokens", 0)) for job in jobs), done

    start, _ = await stored()
    async with asyncio.timeout(60):
        while True:
            now, done = await stored()
            if done or now >= start + tokens:
                return
            await asyncio.sleep(0.01)


async def test_frozen_worker_loses_its_jobs_and_wakes_as_a_zombie_that_harms_nothing(
    server: Server, queue: str, client: Redis, worker: Start
) -> None:
    submitter = Submitter(client, queue)
    flags = ("--lease-s", "1", "--max-batch", "4")
    with worker("one", *flags) as one:
        one.wait_serving()
        for n in range(4):
            await submitter.enqueue(
                f"j{n}", prompt=f"{n} rain", max_tokens=480, temperature=0, ignore_eos=True
            )
        for n in range(4):
            await submitter.until(f"j{n}", tokens=5)
        one.send(signal.SIGSTOP)
        with worker("two", *flags) as two:
            for n in range(4):
                await submitter.terminal(f"j{n}", START_S)
            one.send(signal.SIGCONT)
            two.send(signal.SIGTERM)
            assert two.wait() == 0
            await submitter.enqueue("after", prompt="x", max_tokens=4, ignore_eos=True)
            await submitter.terminal("after")
            one.send(signal.SIGTERM)
            assert one.wait() == 0
    for n in range(4):
        events = await submitter.events(f"j{n}")
        assert len(check_stream(events)) == 480
        assert [e["worker"] for e in events if e["type"] == "resumed"] == ["two"]
    assert (await submitter.events("after"))[0]["worker"] == "one"


async def test_bad_input_fails_clearly_beside_a_good_job(
    queue: str, client: Redis, worker: Start
) -> None:
    submitter = Submitter(client, queue)
    good: dict[str, Any] = {
        "prompt": "the fox",
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
    }
    big = b'{"prompt":"' + b"a" * 10_000_000 + b'"}'
    bad: dict[str, tuple[bytes, str]] = {
        "not-json": (b"not json", "bad_request"),
        "not-utf8": (b'{"prompt":"\xff"}', "bad_request"),
        "unknown-field": (b'{"prompt":"Hi","nonsense":1}', "bad_request"),
        "wrong-type": (b'{"prompt":7}', "bad_request"),
        "no-prompt": (b"{}", "bad_request"),
        "two-prompts": (b'{"prompt":"a","prompt_token_ids":[1]}', "bad_request"),
        "empty-prompt": (b'{"prompt":""}', "bad_request"),
        "long-prompt": (b'{"prompt":"' + b"a b " * 1000 + b'"}', "context_overflow"),
        "too-many-tokens": (b'{"prompt":"Hi","max_tokens":512}', "context_overflow"),
        "zero-tokens": (b'{"prompt":"Hi","max_tokens":0}', "bad_request"),
        "negative-tokens": (b'{"prompt":"Hi","max_tokens":-4}', "bad_request"),
        "cold": (b'{"prompt":"Hi","temperature":-1}', "bad_request"),
        "nan": (b'{"prompt":"Hi","temperature":NaN}', "bad_request"),
        "10-MB": (big, "context_overflow"),
        "alien-ids": (b'{"prompt_token_ids":[1,300]}', "bad_request"),
        "negative-ids": (b'{"prompt_token_ids":[-1]}', "bad_request"),
        "no-ids": (b'{"prompt_token_ids":[]}', "bad_request"),
        "unknown-role": (b'{"messages":[{"role":"boss","content":"x"}]}', "bad_request"),
        "no-messages": (b'{"messages":[]}', "bad_request"),
    }
    with worker("one", "--max-batch", "4") as one:
        one.wait_serving()
        await submitter.enqueue("reference", **good)
        await submitter.terminal("reference")
        await submitter.enqueue("good", **good)
        for job_id, (spec, _) in bad.items():
            reply = await submitter.enqueue(job_id, spec, call={"max_bytes": 2**24})
            assert reply.status == "ok"
        for job_id, (_, code) in bad.items():
            terminal = await submitter.terminal(job_id)
            assert (terminal["type"], terminal["code"]) == ("failed", code), terminal
            assert 10 < len(terminal["message"]) < 300 and "Traceback" not in terminal["message"]
            assert len(await submitter.events(job_id)) == 1
        assert (await submitter.terminal("good"))["finish_reason"] == "length"
        one.send(signal.SIGTERM)
        assert one.wait() == 0
    assert text_of(await submitter.events("good")) == text_of(await submitter.events("reference"))
    assert check_stream(await submitter.events("good"))


async def test_sigterm_releases_after_the_drain_timeout_and_another_worker_goes_on(
    queue: str, client: Redis, worker: Start
) -> None:
    submitter = Submitter(client, queue)
    fields: dict[str, Any] = {
        "prompt": "plain",
        "max_tokens": 500,
        "temperature": 0,
        "ignore_eos": True,
    }
    with worker("one", "--drain-timeout-s", "0", "--lease-s", "60") as one:
        one.wait_serving()
        await submitter.enqueue("a", **fields)
        await submitter.until("a", tokens=3)
        one.send(signal.SIGTERM)
        assert one.wait() == 0
    with worker("two", "--lease-s", "60") as two:
        two.wait_serving()
        await submitter.enqueue("reference", **fields)
        await submitter.terminal("a")
        await submitter.terminal("reference")
    events = await submitter.events("a")
    assert "requeued" in [event["type"] for event in events]
    assert check_stream(events) == check_stream(await submitter.events("reference"))


def test_bad_flags_stop_the_start_with_one_line(tiny_model: Path, worker: Start) -> None:
    for flag, value in {
        "--max-batch": "0",
        "--lease-s": "-1",
        "--queue": "a b",
        "--redis": "http://x",
        "--log-level": "loud",
    }.items():
        process = worker("bad", flag, value)
        run = subprocess.run(process._command, capture_output=True, text=True, timeout=60)
        assert run.returncode == 2, run.stderr
        assert flag in run.stderr and "Traceback" not in run.stderr
        assert len(run.stderr.strip().splitlines()) == 1, run.stderr


def test_missing_model_exits_2(server: Server, queue: str, tmp_path: Path) -> None:
    process = WorkerProcess(
        str(tmp_path / "nothing"), server.url, queue, "one", tmp_path / "one.log"
    )
    with process:
        assert process.wait(START_S) == 2
    assert "Traceback" not in process.log.read_text()
