"""The console blocks of protocol/README.md, run against a server of their own, output and all."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest

from mlxq.protocol.errors import FailureCode
from mlxq.protocol.events import Event, FinishReason
from mlxq.protocol.jobs import Job
from mlxq.protocol.scripts import write_sources
from tests.server import Server, binary

pytestmark = pytest.mark.skipif(
    shutil.which("redis-cli") is None or binary() is None,
    reason="needs redis-cli and a server",
)

SUBSCRIBE = "redis-cli SUBSCRIBE"
WAIT_S = 30.0


def steps() -> list[tuple[str, str]]:
    """Commands (`$ ...`) of all console blocks, in order, each with the lines below it."""
    text = (files("mlxq.protocol") / "README.md").read_text(encoding="utf-8")
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def same_on_any_server(output: str) -> str:
    """Clock values and a few words are the server's own."""
    output = output.replace("\r", "").replace("server_mode", "redis_mode")
    output = re.sub(r"\b\d{13}-\d+\b", "1700000000000-0", output)
    return re.sub(r"NOPERM .*", "NOPERM", output).strip()


@pytest.fixture
def server() -> Iterator[Server]:
    """One of its own: the README speaks of the queue `default` and adds a user."""
    running = Server().start()
    yield running
    running.stop()


@contextmanager
def subscriber(server: Server, command: str, log: Path) -> Iterator[None]:
    """The README's other terminal."""
    words = ["redis-cli", "-p", str(server.port), "--no-raw", *shlex.split(command)[1:]]
    with log.open("wb") as output, subprocess.Popen(words, stdout=output) as process:
        try:
            yield
        finally:
            process.kill()


def received(log: Path, wanted: str) -> str:
    """What the subscriber has printed, once it is as long as what is wanted."""
    deadline = time.monotonic() + WAIT_S
    while True:
        output = log.read_text().replace("Reading messages... (press Ctrl-C to quit)\n", "")
        if len(output) >= len(wanted) or time.monotonic() > deadline:
            return output
        time.sleep(0.05)


def run(server: Server, command: str, folder: Path) -> str:
    # --no-raw: as redis-cli prints to a terminal.
    prefix = f'redis-cli() {{ command redis-cli -p {server.port} --no-raw "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", prefix + command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
    )
    return done.stdout


def test_every_line_does_what_the_readme_shows(server: Server, tmp_path: Path) -> None:
    write_sources(tmp_path / "lua")
    found = steps()
    assert len(found) > 20
    log = tmp_path / "subscriber"
    [subscribe] = {command for command, _ in found if command.startswith(SUBSCRIBE)}
    with subscriber(server, subscribe, log):
        for command, wanted in found:
            if command == subscribe:
                output = received(log, wanted)
            else:
                output = run(server, command, tmp_path)
            assert same_on_any_server(output) == same_on_any_server(wanted), command


def test_every_job_field_and_event_type_is_in_the_readme() -> None:
    text = (files("mlxq.protocol") / "README.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([^`\n]+)`", text))
    names = [*Job.__struct_fields__, *get_args(FailureCode), *get_args(FinishReason)]
    names += [kind.__struct_config__.tag for kind in get_args(Event)]
    names += [field for kind in get_args(Event) for field in kind.__struct_fields__]
    assert set(names) - {"id"} <= words
