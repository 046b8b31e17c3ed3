"""No log, error, repr or status shows a password, and no log shows a prompt."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxq.producer import MlxqError, Producer
from mlxq.producer.commands import app
from tests.security.acl import User
from tests.server import free_port
from tests.worker.harness import Submitter
from tests.worker.processes import START_S

MAIN = "import sys; from mlxq.producer.cli import main; sys.exit(main())"
WRONG = "wr0ng-pa55"
PROMPT = "a prompt that nobody else may read"

Start = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, queue: str) -> Start:
    """Starts `mlxq worker` with its URL in the environment; its output goes to NAME.log."""

    def start(name: str, url: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", MAIN, "worker", str(tiny_model), "--name", name]
        environment = {**os.environ, "MLXQ_REDIS_URL": url, "MLXQ_QUEUE": queue}
        environment |= {"MLXQ_LOG_LEVEL": "debug", "MLXQ_LEASE_S": "1"}
        with open(tmp_path / f"{name}.log", "wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    return start


@pytest.mark.slow
async def test_a_worker_shows_no_password_and_no_prompt(
    users: dict[str, User], queue: str, start: Start, submitter: Submitter, tmp_path: Path
) -> None:
    user = users["worker"]
    urls = {
        "right": user.url,
        "wrong": f"redis://{user.name}:{WRONG}@127.0.0.1:{user.port}",
        "down": f"redis://{user.name}:{user.password}@127.0.0.1:{free_port()}",
        "bad": f"redis://{user.name}:{user.password}@127.0.0.1:nowhere",
    }
    workers = {name: start(name, url) for name, url in urls.items()}
    try:
        await submitter.enqueue("a", prompt=PROMPT, max_tokens=5)
        await submitter.enqueue("b", messages=[{"role": "user", "content": PROMPT}], top_p=7)
        await submitter.enqueue("c", prompt=PROMPT, max_tokens=5000)
        await submitter.enqueue("d", prompt=PROMPT, stop=[PROMPT] * 99)
        for job_id in "abcd":
            await submitter.terminal(job_id, START_S)
        await _until_logged(workers["down"], tmp_path / "down.log", "redis_lost")
        assert {name: workers[name].wait(START_S) for name in ("wrong", "bad")} == {
            "wrong": 2,
            "bad": 2,
        }
        for name in ("right", "down"):
            assert user.password not in _command_line(workers[name].pid)
            workers[name].send_signal(signal.SIGTERM)
        assert {name: workers[name].wait(START_S) for name in ("right", "down")} == {
            "right": 0,
            "down": 0,
        }
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    logs = {name: _said(tmp_path / f"{name}.log") for name in urls}
    assert "ended" in logs["right"] and "bad Redis URL" in logs["bad"]
    assert "refuses the user or the password" in logs["wrong"]
    assert "serving" not in logs["wrong"] + logs["down"]
    for name, log in logs.items():
        for secret in (user.password, WRONG, PROMPT):
            assert secret not in log, name


async def _until_logged(worker: subprocess.Popen[bytes], log: Path, text: str) -> None:
    async with asyncio.timeout(START_S):
        while text not in _said(log):
            assert worker.poll() is None, _said(log)
            await asyncio.sleep(0.05)


def _said(log: Path) -> str:
    return log.read_text()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:  # no /proc on a Mac
        return subprocess.run(
            ["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, timeout=10
        ).stdout


def urls_of(user: User) -> dict[str, tuple[str, str]]:
    """By what is wrong with it, a URL and the password in it."""
    return {
        "right": (user.url, user.password),
        "wrong": (f"redis://{user.name}:{WRONG}@127.0.0.1:{user.port}", WRONG),
        "down": (f"redis://{user.name}:{WRONG}@127.0.0.1:{free_port()}", WRONG),
        "no such host": (f"redis://{user.name}:{WRONG}@nowhere.invalid", WRONG),
        "no sentinel": (f"redis+sentinel://u:{WRONG}@127.0.0.1:{free_port()}/master", WRONG),
        "no cluster": (f"redis+cluster://u:{WRONG}@127.0.0.1:{user.port}", WRONG),
    }


async def test_a_producer_shows_no_password(
    users: dict[str, User], queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for kind, (url, secret) in urls_of(users["submitter"]).items():
        caplog.clear()
        shown = [f"{kind}:"]
        async with Producer(url, queue, submit_timeout_s=0.3) as producer:
            for attempt in (producer.submit(prompt="a"), producer.ping(), producer.status()):
                try:
                    shown.append(repr(await attempt))
                except MlxqError as error:
                    shown += traceback.format_exception(error)
            shown += [repr(producer), str(producer), repr(vars(producer))]
        shown += [repr(vars(record)) for record in caplog.records]
        assert len(shown) > 4
        assert secret not in "".join(shown), kind


@pytest.mark.parametrize("kind", ["right", "wrong", "down", "bad"])
def test_the_commands_show_no_password(
    users: dict[str, User], queue: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = users["submitter"]
    bad = (f"redis://{user.name}:{WRONG}/x@127.0.0.1", WRONG)
    url, secret = {**urls_of(user), "bad": bad}[kind]
    monkeypatch.setattr("mlxq.producer.options.TIMEOUT_S", 0.3)
    monkeypatch.setenv("MLXQ_REDIS_URL", url)
    commands = [["submit", "Hi", "--detach"], ["abort", "a"], ["status"], ["status", "--help"]]
    if kind != "right":
        commands.append(["follow", "a"])  # else it waits for the job
    for command in commands:
        done = CliRunner().invoke(app, [*command, *(["--queue", queue])])
        assert done.exception is None or isinstance(done.exception, SystemExit), command
        assert secret not in done.output + done.stderr, command
        if kind == "bad":
            assert done.exit_code == (0 if "--help" in command else 2), command
