"""The `mlxq` command as a user runs it: a process of its own against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from mlxq import __version__
from mlxq.producer import Producer
from mlxq.producer.commands import app
from mlxq.protocol.events import Token, encode_event
from mlxq.protocol.jobs import Job, Message, decode_job
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import DONE
from tests.producer.hand import HandWorker
from tests.proxy import Proxy
from tests.server import Server, free_port

pytestmark = pytest.mark.any_server

# What a shell has put in the background ignores SIGINT, and its children inherit that.
HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
MAIN = f"{HEED_CTRL_C}; from mlxq.producer.cli import main; main()"
MOST_S = 60.0


class Shell:
    """Runs `mlxq` with the server and the queue of the test in its environment."""

    def __init__(self, url: str, queue: str) -> None:
        self.queue = queue
        self.environment = {**os.environ, "MLXQ_REDIS_URL": url, "MLXQ_QUEUE": queue}

    async def start(self, *arguments: str, program: str = MAIN) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self.environment,
        )

    async def run(self, *arguments: str, program: str = MAIN) -> tuple[int, str, str]:
        return await end(await self.start(*arguments, program=program))


async def end(process: Process) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        async with asyncio.timeout(MOST_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def shell(server: Server, queue: str) -> Shell:
    return Shell(server.url, queue)


async def test_submit_streams_the_text(shell: Shell, worker: HandWorker) -> None:
    process = await shell.start(
        "submit", "Hi", "--max-tokens", "8", "--temperature", "0", "--seed", "7"
    )
    hand = await worker.take()
    assert decode_job(hand.spec) == Job(
        messages=[Message(role="user", content="Hi")], max_tokens=8, temperature=0.0, seed=7
    )
    await hand.start()
    await hand.say("Hel")
    assert process.stdout is not None
    assert await process.stdout.readexactly(3) == b"Hel"
    await hand.finish("lo")
    assert await end(process) == (0, "lo\n", "")


async def test_submit_takes_a_system_message_and_stops(shell: Shell, worker: HandWorker) -> None:
    flags = ["--system", "Be brief.", "--top-p", "0.5", "--stop", "a", "--stop", "b"]
    flags += ["--min-tokens", "3"]
    assert (await shell.run("submit", "--detach", "Hi", *flags))[0] == 0
    assert decode_job((await worker.take()).spec) == Job(
        messages=[Message("system", "Be brief."), Message("user", "Hi")],
        min_tokens=3,
        top_p=0.5,
        stop=["a", "b"],
    )


async def test_submit_tells_the_id_when_asked(shell: Shell, worker: HandWorker) -> None:
    process = await shell.start("submit", "Hi", "--verbose")
    hand = await worker.take()
    await hand.finish("x")
    assert await end(process) == (0, "x\n", f"job {hand.id}\n")


async def test_no_worker_is_told(shell: Shell, worker: HandWorker) -> None:
    program = f"import mlxq.producer.job_view as v; v.PATIENCE_S = 0.1; {MAIN}"
    process = await shell.start("submit", "Hi", program=program)
    assert process.stderr is not None
    line = f"mlxq: no worker serves queue {shell.queue}; waiting (Ctrl-C to stop)\n"
    assert (await process.stderr.readline()).decode() == line
    await (await worker.take()).finish("at last")
    assert await end(process) == (0, "at last\n", "")


async def test_a_busy_worker_is_no_worker_missing(
    shell: Shell, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    await client.zadd(keys.workers, {"mac1": 1})
    await client.hset(keys.worker("mac1"), "slots", 1)
    program = f"import mlxq.producer.job_view as v; v.PATIENCE_S = 0.1; {MAIN}"
    process = await shell.start("submit", "Hi", program=program)
    hand = await worker.take()
    await asyncio.sleep(1)
    await hand.finish("x")
    assert await end(process) == (0, "x\n", "")


async def test_submit_prints_events_as_json(shell: Shell, worker: HandWorker) -> None:
    process = await shell.start("submit", "--raw", "--priority", "high", "--json", "Once")
    hand = await worker.take()
    assert decode_job(hand.spec) == Job(prompt="Once")
    await hand.start()
    await hand.finish("x")
    code, out, err = await end(process)
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [(event["id"], event["type"]) for event in events] == [
        ("1-1", "started"),
        ("1-2", "token"),
        ("1-3", "done"),
    ]


async def test_submit_detached_then_follow(shell: Shell, worker: HandWorker) -> None:
    code, out, _ = await shell.run("submit", "--detach", "Hi")
    job_id = out.strip()
    assert code == 0
    hand = await worker.take()
    assert hand.id == job_id
    await hand.start()
    await hand.say("one ", "two ")
    await hand.finish("three")
    assert await shell.run("follow", job_id) == (0, "one two three\n", "")
    assert await shell.run("follow", job_id, "--after", "1-2") == (0, "two three\n", "")


async def test_submit_reads_stdin(shell: Shell, worker: HandWorker) -> None:
    process = await shell.start("submit", "--detach", "-")
    await process.communicate(b"from a pipe")
    hand = await worker.take()
    assert decode_job(hand.spec).messages == [Message(role="user", content="from a pipe")]


async def test_follow_gives_the_result_when_the_transcript_has_expired(
    shell: Shell, producer: Producer, worker: HandWorker, client: Redis, keys: Keys
) -> None:
    job = await producer.submit(prompt="a")
    await (await worker.take()).finish("kept")
    await client.delete(keys.events(job.id))
    assert await shell.run("follow", job.id) == (0, "kept\n", "")
    code, out, err = await shell.run("follow", job.id, "--after", "1-1")
    assert (code, out) == (1, "")
    assert err.startswith("mlxq: ")


async def test_ctrl_c_aborts_the_job(shell: Shell, worker: HandWorker, producer: Producer) -> None:
    process = await shell.start("submit", "Hi")
    hand = await worker.take()
    await hand.start()
    await hand.say("so far")
    assert process.stdout is not None
    assert await process.stdout.readexactly(6) == b"so far"
    process.send_signal(signal.SIGINT)
    assert await end(process) == (130, "\n", f"mlxq: job {hand.id}: aborted\n")
    result = await producer.attach(hand.id).result()
    assert (result.finish_reason, result.text) == ("aborted", "so far")


async def test_ctrl_c_without_a_server_says_how_to_abort(
    proxy: Proxy, worker: HandWorker, queue: str
) -> None:
    program = f"import mlxq.producer.options as o; o.TIMEOUT_S = 2.0; {MAIN}"
    process = await Shell(proxy.url, queue).start("submit", "Hi", program=program)
    hand = await worker.take()
    await hand.start()
    await hand.say("x")
    assert process.stdout is not None
    assert await process.stdout.readexactly(1) == b"x"
    proxy.down = True
    proxy.cut()
    process.send_signal(signal.SIGINT)
    code, _, err = await end(process)
    assert code == 130
    assert err.startswith("mlxq: no answer from Redis")
    assert err.endswith(f"; the job may go on: mlxq abort {hand.id}\n")


async def test_ctrl_c_on_follow_leaves_the_job_running(
    shell: Shell, worker: HandWorker, producer: Producer
) -> None:
    job = await producer.submit(prompt="a")
    hand = await worker.take()
    await hand.start()
    await hand.say("x")
    process = await shell.start("follow", job.id)
    assert process.stdout is not None
    assert await process.stdout.readexactly(1) == b"x"
    process.send_signal(signal.SIGINT)
    assert (await end(process))[0] == 130
    await hand.finish("y")
    assert (await job.result()).text == "xy"


async def test_a_closed_pipe_aborts_the_job(
    shell: Shell, worker: HandWorker, producer: Producer
) -> None:
    process = await asyncio.create_subprocess_shell(
        f"{sys.executable} -c '{MAIN}' submit Hi | head -c 1",
        stdout=PIPE,
        stderr=PIPE,
        env=shell.environment,
    )
    hand = await worker.take()
    await hand.start()
    await hand.say("x")
    assert process.stdout is not None
    assert await process.stdout.readexactly(1) == b"x"
    # The text after `head` has gone ends the command, and the command the job.
    token = encode_event(Token(text="y", ids=[1]))
    while await hand.offer(token) == [DONE]:
        await asyncio.sleep(0.01)
    assert (await producer.attach(hand.id).result()).finish_reason == "aborted"
    assert await end(process) == (0, "", "")


async def test_abort(shell: Shell, producer: Producer) -> None:
    job = await producer.submit(prompt="a")
    assert await shell.run("abort", job.id) == (0, "aborted\n", "")
    assert await shell.run("abort", job.id) == (0, "finished\n", "")
    code, out, err = await shell.run("abort", "nobody")
    where = f"in queue {shell.queue} with --shards 1; both must be as at its submit"
    assert (code, out, err) == (1, "unknown\n", f"mlxq: no job nobody is known {where}\n")
    for command in ("follow", "dead show"):
        code, out, err = await shell.run(*command.split(), "nobody", "--shards", "4")
        assert (code, out) == (1, "")
        assert f"in queue {shell.queue} with --shards 4" in err
    code, _, err = await shell.run("follow", job.id)
    assert (code, err) == (1, "mlxq: the job was aborted\n")


async def test_a_failed_job(shell: Shell, worker: HandWorker) -> None:
    process = await shell.start("submit", "Hi")
    hand = await worker.take()
    await hand.start()
    await hand.say("x")
    await hand.fail("context_overflow", "the prompt is too long")
    assert await end(process) == (1, "x\n", "mlxq: context_overflow: the prompt is too long\n")


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ["submit"]),
        (2, ["submit", "Hi", "--max-tokens", "many"]),
        (2, ["submit", "Hi", "--max-tokens", "0"]),
        (2, ["submit", "Hi", "--temperature", "-1"]),
        (2, ["submit", "Hi", "--system", "Be kind", "--raw"]),
        (2, ["submit", "Hi", "--priority", "urgent"]),
        (2, ["submit", "Hi", "--redis", "http://localhost"]),
        (2, ["submit", "Hi", "--queue", "a b"]),
        (2, ["follow", "a/b"]),
        (2, ["dance"]),
        (1, ["follow", "nobody"]),
        (1, ["follow", "nobody", "--after", "here"]),
    ],
)
async def test_what_is_refused(code: int, arguments: list[str], shell: Shell) -> None:
    found, out, err = await shell.run(*arguments)
    assert (found, out) == (code, "")
    assert err
    if "mlxq:" in err:
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Hi", "--temperature", "-1"], "Expected `float` >= 0.0 - at --temperature"),
        (["Hi", "--max-tokens", "0"], "Expected `int` >= 1 - at --max-tokens"),
        (
            ["Hi", "--min-tokens", "5", "--max-tokens", "3"],
            "--min-tokens 5 is more than --max-tokens 3",
        ),
        (["Hi", "--top-p", "nan"], "--top-p is nan: a finite number is needed"),
        (["Hi", "--stop", "a", "--stop", ""], "Expected `str` of length >= 1 - at --stop"),
        (["Hi", "--deadline-s", "0"], "--deadline-s must be above 0 seconds, not 0.0"),
        (["", "--raw"], "TEXT is empty"),
        ([" \n"], "TEXT is empty"),
    ],
)
def test_a_bad_value_is_named_by_its_flag(arguments: list[str], told: str) -> None:
    ended = CliRunner().invoke(app, ["submit", *arguments])
    assert (ended.exit_code, ended.stdout, ended.stderr) == (2, "", f"mlxq: {told}\n")


async def test_no_server_is_told_in_one_line_without_the_password(queue: str) -> None:
    program = f"import mlxq.producer.options as o; o.TIMEOUT_S = 0.2; {MAIN}"
    shell = Shell(f"redis://:hunter2@127.0.0.1:{free_port()}", queue)
    for arguments in (["submit", "Hi"], ["follow", "a"], ["abort", "a"], ["status"]):
        code, out, err = await shell.run(*arguments, program=program)
        assert (code, out) == (1, "")
        assert err.startswith("mlxq: ")
        assert err.count("\n") == 1
        assert "hunter2" not in err


async def test_status(shell: Shell, producer: Producer, client: Redis, keys: Keys) -> None:
    code, out, _ = await shell.run("status")
    assert code == 0
    assert "no workers" in out
    for priority in ("high", "normal", "normal"):
        await producer.submit(prompt="a", priority="high" if priority == "high" else "normal")
    await client.xadd(keys.dead, {"id": "a"})
    seconds, _ = await client.time()
    full: Any = {"name": "mac1", "owner": "mac1.abc", "model": "smol", "slots": 16, "running": 3}
    full |= {"jobs_per_s": "0.5"}
    full |= {"tokens_per_s": "41.25", "version": "0.1.0", "host": "attic", "pid": 77}
    await client.hset(keys.worker("mac1"), mapping={**full, "seen_ms": (seconds - 5) * 1000})
    await client.hset(keys.worker("mac2"), mapping={"slots": "many", "mood": "fine"})
    await client.zadd(keys.workers, {"mac1": 1, "mac2": 2, "expired": 0})
    code, out, err = await shell.run("status")
    assert (code, err) == (0, "")
    head, waiting, columns, first, second = (line.rstrip() for line in out.splitlines())
    assert head == f"queue {keys.queue}: high 1  normal 2  low 0 (queued + running), dead 1"
    assert waiting.startswith("waiting 3, oldest ") and waiting.endswith("estimated wait 0.0 s")
    assert columns.split() == "worker model slots tok/s jobs/s host pid version seen".split()
    assert first.split()[:8] == ["mac1", "smol", "3/16", "41.2", "0.50", "attic", "77", "0.1.0"]
    assert second.split() == ["mac2", "-", "0/0", "0.0", "0.00", "-", "-", "-", "-"]
    code, out, _ = await shell.run("status", "--json")
    status = json.loads(out)
    assert status["jobs"] == {"high": 1, "normal": 2, "low": 0}
    assert [each["name"] for each in status["workers"]] == ["mac1", "mac2"]
    await client.hset(keys.worker("mac1"), "state", "draining")
    code, out, _ = await shell.run("status")
    assert "mac1    smol   3/16 draining" in out and "estimated wait unknown" in out


async def test_the_library_needs_redis_and_msgspec_alone(shell: Shell) -> None:
    program = "import sys, mlxq.producer; print(*sys.modules)"
    code, out, _ = await shell.run(program=program)
    assert code == 0
    loaded = {name.partition(".")[0] for name in out.split()}
    assert loaded & {"redis", "msgspec"} == {"redis", "msgspec"}
    assert not loaded & {"typer", "click", "rich", "structlog", "mlx", "mlx_lm", "transformers"}
    assert "mlxq.worker" not in out.split()


async def test_without_the_cli_extra(shell: Shell) -> None:
    program = f"import sys; sys.modules['typer'] = None; {MAIN}"
    expected = 'mlxq: the command line needs: pip install "mlxq[cli]"\n'
    assert await shell.run("status", program=program) == (2, "", expected)


async def test_commands_of_other_parts(shell: Shell, tmp_path: Path) -> None:
    """Registered in `mlxq.commands`; one that cannot be imported spoils no other."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mlxq.commands]\ngreet = other_part:greet\nbroken = other_part.missing:run [extra]\n"
    )
    (tmp_path / "other_part.py").write_text(
        "def greet(name: str, loud: bool = False) -> None:\n"
        "    '''Say hello to NAME.'''\n"
        "    print(name.upper() if loud else name)\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {MAIN}"
    assert await shell.run("greet", "Ada", "--loud", program=program) == (0, "ADA\n", "")
    code, out, _ = await shell.run("greet", "--help", program=program)
    assert code == 0
    assert "Say hello to NAME." in out
    code, _, _ = await shell.run("greet", program=program)
    assert code == 2
    code, out, err = await shell.run("broken", "--any", program=program)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert 'pip install "mlxq[extra]"' in err
    code, out, _ = await shell.run("--help", program=program)
    assert code == 0
    listed = [line.strip("│ \n").split(maxsplit=1) for line in out.splitlines()]
    assert ["greet", "Say hello to NAME."] in listed
    assert ["broken", "Not installed."] in listed
    assert ["worker", "Serve a queue with MODEL until SIGTERM."] in listed


async def test_a_command_that_lacks_what_it_imports_late(shell: Shell) -> None:
    program = f"import sys; sys.modules['structlog'] = None; {MAIN}"
    code, out, err = await shell.run("worker", "model", program=program)
    assert (code, out) == (2, "")
    assert err.endswith('it needs: pip install "mlxq[worker]"\n')
    assert err.count("\n") == 1


async def test_version(shell: Shell) -> None:
    assert await shell.run("--version") == (0, f"mlxq {__version__}\n", "")
