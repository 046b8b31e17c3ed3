"""All that decodes bytes from Redis raises what it documents, whatever the bytes. See ops/fuzz."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings, strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from mlxq.producer import Producer
from mlxq.protocol.errors import BadRequest
from mlxq.protocol.events import decode_event, decode_result
from mlxq.protocol.jobs import decode_job
from mlxq.protocol.keys import Keys, check_job_id
from mlxq.protocol.scripts import FENCED, Scripts, look, run_blocking
from ops.lib.bootstrap import ROOT
from ops.lib.fuzz.draw import KNOWN
from ops.lib.fuzz.inputs import inputs
from ops.lib.fuzz.targets import TARGETS

if TYPE_CHECKING:  # a module that has it is run again on redis-server, all of it
    from tests.server import Server

BRIEFLY = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_undocumented_escapes(name: str) -> None:
    @BRIEFLY
    @given(inputs(name))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_known_texts(name: str) -> None:
    """Each of them alone, and after every first byte that chooses what is read next."""
    for known in KNOWN:
        TARGETS[name](known)
    for first in range(0, 256, 51):
        for second in range(len(KNOWN)):
            TARGETS[name](bytes([first, 2, second, first, 2, second + 1, 5, first]) * 4)


@pytest.mark.parametrize("decode", [decode_job, decode_event, decode_result])
@pytest.mark.parametrize(
    "bomb",
    [
        b'{"prompt_token_ids":' + b"[" * 1_000_000,
        b'{"type":"token","text":"a","ids":[1],"logprobs":' + b"[" * 1_000_000,
        b'{"text":"a","token_ids":[' + b"9" * 1_000_000 + b'],"finish_reason":"stop"}',
        b'{"seed":' + b"9" * 1_000_000 + b"}",
        b'{"' + b"\\u0041" * 200_000 + b'":1}',
    ],
    ids=["nested lists", "nested unknowns", "a huge number", "a huge seed", "a huge name"],
)
def test_small_inputs_need_little_memory(decode: object, bomb: bytes) -> None:
    assert callable(decode)
    tracemalloc.start()
    try:
        decode(bomb)
    except Exception as error:
        assert len(str(error)) < len(bomb) * 2
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 32 * 2**20


JOB_IDS = st.text(max_size=80) | st.sampled_from(
    ["a:b", "a}", "{mlxq:x}:job:a", "../a", "a\x00", "a\n", "*", "a b", "é", "", "a" * 65, "ok-1"]
)


@BRIEFLY
@given(JOB_IDS)
@example("\udcff")
@example("a" * 64)
def test_an_id_is_one_or_is_refused(job_id: str) -> None:
    """By every function that takes one: none is ever part of a key unchecked."""
    producer = Producer("redis://127.0.0.1:1", shards=3)
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", job_id):
        assert check_job_id(job_id) == producer.attach(job_id).id == job_id
        return
    for refusing in (check_job_id, producer.attach):
        with pytest.raises(BadRequest, match="bad job id"):
            refusing(job_id)
    for asking in (producer.submit(prompt="a", job_id=job_id), producer.dead.show(job_id)):
        with pytest.raises(BadRequest, match="bad job id"):
            asking.send(None)
    with pytest.raises(BadRequest, match="bad queue name"):
        Producer("redis://127.0.0.1:1", f"{job_id}/")


@pytest.mark.parametrize("value", [None, 5, b"a", ["a"]])
def test_an_id_of_another_type_is_refused(value: Any) -> None:
    for refusing in (check_job_id, Keys, Producer("redis://127.0.0.1:1").attach):
        with pytest.raises(BadRequest):
            refusing(value)


def test_no_id_makes_a_script_touch_another_key(server: Server) -> None:
    """A bad id is answered as the id of no job, and nothing in the database changes."""
    keys = Keys(f"t{uuid.uuid4().hex[:12]}")
    scripts = Scripts(keys)

    with redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as client:
        run_blocking(client, scripts.enqueue("good", b"{}"))
        run_blocking(client, scripts.take("w.1", 1, lease_ms=60_000))
        before = _dump(client, keys)

        @BRIEFLY
        @given(st.binary(max_size=80) | JOB_IDS.map(lambda text: text.encode("utf-8", "replace")))
        @example(b"good\x00")
        @example(keys.job("good").encode())
        def run(raw: bytes) -> None:
            job_id = raw.decode("latin-1")  # as many characters as bytes
            if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", job_id):
                return
            assert run_blocking(client, scripts.enqueue(job_id, b"{}")).status == "bad_id"
            assert run_blocking(client, scripts.abort(job_id)) == "unknown"
            assert run_blocking(client, scripts.emit("w.1", [look(job_id, 1)])) == [FENCED]
            assert run_blocking(client, scripts.beat("w.1", [(job_id, 1)])) == [FENCED]
            assert run_blocking(client, scripts.release("w.1", "drain", [(job_id, 1)])) == [FENCED]
            finish = scripts.finish(
                "w.1", job_id, 1, seq=1, tokens=0, state="done", result=b"", events=[b"{}"]
            )
            assert run_blocking(client, finish) == FENCED
            assert _dump(client, keys) == before

        run()


def _dump(client: redis.Redis, keys: Keys) -> dict[bytes, bytes | None]:
    return {key: client.dump(key) for key in client.scan_iter(f"{keys.tag}*", count=10_000)}


def test_the_command_runs_and_tells_a_failure() -> None:
    command = [sys.executable, str(ROOT / "ops" / "fuzz"), "--engine", "hypothesis"]
    done = subprocess.run(
        [*command, "--seconds", "0.1", "--seed", "5", "reply", "dead"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+) +hypothesis seed 5 \d+ s: [\d,]+ inputs$", done.stdout, re.M) == [
        "reply",
        "dead",
    ]
    assert subprocess.run([*command, "nothing"], capture_output=True, timeout=120).returncode == 2


def test_a_failing_target_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.lib.fuzz import main

    def broken(data: bytes) -> None:
        assert b"\x07" not in data

    monkeypatch.setitem(TARGETS, "reply", broken)
    told = main.with_hypothesis("reply", 60, 1)
    assert told.startswith("FAILED with seed") and "AssertionError" in told
