"""Dead letters: listed, shown, given another try, dropped."""

from __future__ import annotations

import json

import pytest
from redis.asyncio import Redis

from mlxq.producer import Producer
from mlxq.protocol.errors import UnknownJob
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import Scripts, look, run
from tests.producer.hand import HandWorker
from tests.producer.test_cli import Shell


@pytest.fixture
def shell(server: object, queue: str) -> Shell:
    return Shell(getattr(server, "url", ""), queue)


async def _kill(client: Redis, keys: Keys, job_id: str) -> None:
    """Three workers in a row crash with the job before its first token."""
    scripts = Scripts(keys)
    for number in range(3):
        owner = f"victim{number}.1"
        take = await run(client, scripts.take(owner, 1, lease_ms=60_000, alone=True))
        [taken] = take.jobs
        assert taken.id == job_id
        await run(client, scripts.emit(owner, [look(job_id, taken.attempt)]))
        await run(client, scripts.release(owner, "crash", [(job_id, taken.attempt)]))
    await run(client, scripts.take("last.1", 1, lease_ms=60_000, alone=True))


async def test_dead_letters_are_listed_shown_requeued_and_purged(
    producer: Producer, client: Redis, keys: Keys, worker: HandWorker, shell: Shell
) -> None:
    assert await producer.dead.all() == []
    for job_id in ("poison", "other"):
        await producer.submit(prompt="boom", job_id=job_id, max_tokens=9)
        await _kill(client, keys, job_id)
    first, second = await producer.dead.all()
    assert (first.id, second.id, first.crashes) == ("poison", "other", 3)
    assert first.owner.startswith("victim2") and "3 workers crashed" in first.reason
    assert json.loads(first.spec)["prompt"] == "boom"
    code, out, _ = await shell.run("dead", "list")
    assert code == 0 and "poison" in out and "victim2.1" in out
    code, out, _ = await shell.run("dead", "show", "poison")
    assert code == 0 and json.loads(out)["id"] == "poison"
    assert json.loads(out)["spec"]["max_tokens"] == 9
    code, out, _ = await shell.run("dead", "list", "--json")
    assert [json.loads(line)["spec"]["prompt"] for line in out.splitlines()] == ["boom", "boom"]
    code, out, _ = await shell.run("dead", "requeue", "poison")
    again = out.strip()
    assert code == 0 and again.startswith("poison-r")
    hand = await worker.take()
    assert (hand.id, hand.spec.decode()) == (again, first.spec)
    assert [job.id for job in await producer.dead.all()] == ["other"]
    code, out, _ = await shell.run("dead", "purge")
    assert (code, out.strip()) == (0, "1")
    code, _, err = await shell.run("dead", "show", "poison")
    assert code == 1 and "no dead letter" in err
    with pytest.raises(UnknownJob):
        await producer.dead.requeue("poison")


async def test_a_damaged_spec_is_shown_as_it_is(client: Redis, keys: Keys, shell: Shell) -> None:
    await client.xadd(keys.dead, {"id": "a", "spec": '{"prompt":'})
    code, out, _ = await shell.run("dead", "show", "a")
    assert code == 0 and json.loads(out)["spec"] == '{"prompt":'
