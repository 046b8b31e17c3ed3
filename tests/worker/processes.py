"""Worker processes as an operator runs them, to be killed, frozen and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import redis

START_S = 90.0


class WorkerProcess:
    """`mlxq worker` in a process of its own; its log is in `log`. Killed when the block ends."""

    def __init__(self, model: str, url: str, queue: str, name: str, log: Path, *flags: str) -> None:
        self.name = name
        self.log = log
        self._url = url
        self._queue = queue
        main = "import sys; from mlxq.producer.cli import main; sys.exit(main())"
        self._command = [sys.executable, "-c", main, "worker", model, "--redis", url]
        self._command += ["--queue", queue, "--name", name, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> WorkerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> WorkerProcess:
        """Starts a new process; does not wait for it."""
        assert self.process is None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self

    def wait_serving(self) -> WorkerProcess:
        """Returns once this process has announced itself."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        with redis.Redis.from_url(self._url, decode_responses=True) as client:
            while not self._announced(client):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{self.name} does not serve:\n{self.log.read_text()}")
                time.sleep(0.02)
        return self

    def _announced(self, client: redis.Redis) -> bool:
        assert self.process is not None
        pid = str(self.process.pid)
        keys = client.keys(f"{{mlxq:{self._queue}}}:worker:*")
        return any(client.hget(key, "pid") == pid for key in keys)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code of the process, once it has ended."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def kill(self) -> None:
        """SIGKILL, as a crash or a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
