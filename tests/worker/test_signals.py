"""Signals to a worker process that is on its way out."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from mlxq.protocol.keys import Keys
from mlxq.worker.config import EXIT_DRAINED
from tests.server import Server

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_very_end_leave_the_exit_code_as_it_is(
    number: signal.Signals, server: Server, queue: str
) -> None:
    """Fails where `Orders.listening` does not ignore signals after its block."""
    command = [sys.executable, "-m", "ops.lib.synthetic", "--redis", server.url, "--queue", queue]
    with (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process,
        redis.Redis.from_url(server.url) as client,
    ):
        while not client.keys(Keys(queue).worker("*")):
            assert process.poll() is None
            time.sleep(0.02)
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)
        assert process.stderr is not None
        assert process.returncode == EXIT_DRAINED, process.stderr.read()
