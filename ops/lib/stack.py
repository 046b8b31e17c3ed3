"""A server and workers on this machine for one demo or benchmark; all of it ends with us."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar, cast

from redis.asyncio import Redis

from mlxq.protocol.keys import Keys
from ops.lib.bootstrap import ROOT
from ops.lib.server import Server, connect

T = TypeVar("T")

LOOK_S = 1.0  # how often a silent worker is looked at

# Reads "+PID" and "-PID" from stdin. When that ends, however we ended, it kills who is left.
GUARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
pids = set()
for line in sys.stdin:
    (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Guard:
    """A small process that outlives us just long enough to kill what we left behind."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def add(self, pid: int) -> None:
        self._tell(f"+{pid}")

    def discard(self, pid: int) -> None:
        """Call it once the process is reaped: from then on its pid may be another's."""
        self._tell(f"-{pid}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


class Worker:
    """One worker process with a log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:].strip()

    async def during(self, action: Coroutine[Any, Any, T]) -> T:
        """The result of `action`. Raises RuntimeError if the worker ends before that."""
        task = asyncio.create_task(action)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if self.process.poll() is not None:
                    raise RuntimeError(f"the worker ended:\n{self.last_words()}")
        finally:
            task.cancel()
            await asyncio.wait({task})
        return await task


class Stack:
    """Owns a server, workers and their logs from `with` to its end. Used from one thread.

    model   None: the workers are those of `ops.lib.synthetic`, which need none

    Invariant: a process that was started here and not reaped here is known to the guard.
    """

    def __init__(self, model: Path | None, queue: str, *worker_options: str) -> None:
        self.model = model
        self.queue = queue
        self.worker_options = worker_options
        self.workers: dict[str, Worker] = {}
        self.server = Server()
        self.folder = Path(tempfile.mkdtemp(prefix="mlxq-stack-"))
        self.guard = Guard()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def server_pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    def __enter__(self) -> Stack:
        try:
            self.server.start()
            self.guard.add(self.server_pid)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills everything that still runs. Meant to be the last word: no drain."""
        for name in list(self.workers):
            self.kill(name)
        self.server.stop()
        self.guard.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_worker(self, name: str, *options: str, threads: int = 0) -> Worker:
        """Starts a worker under `name`; `threads` > 0 limits those of its matrix products."""
        if name in self.workers:
            raise ValueError(f"a worker {name} runs already")
        if self.model is None:
            command = [sys.executable, "-m", "ops.lib.synthetic"]
        else:
            command = [str(Path(sys.executable).with_name("mlxq")), "worker", str(self.model)]
        command += ["--redis", self.url, "--queue", self.queue, "--name", name]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if threads > 0:
            environment["OPENBLAS_NUM_THREADS"] = str(threads)
        log = self.folder / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*command, *self.worker_options, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT if self.model is None else None,
                start_new_session=True,
            )
        self.guard.add(process.pid)
        self.workers[name] = Worker(name, process, log)
        return self.workers[name]

    def kill(self, name: str) -> None:
        """SIGKILL, as if the machine had gone. A worker that has ended already is forgotten."""
        worker = self.workers.pop(name)
        worker.process.kill()
        worker.process.wait()
        self.guard.discard(worker.pid)

    async def stop(self, name: str, timeout_s: float = 60.0) -> int:
        """SIGTERM: the worker drains. Returns its exit code.

        Raises subprocess.TimeoutExpired, the worker killed, if it takes too long.
        """
        worker = self.workers[name]
        worker.process.terminate()
        try:
            status = await asyncio.to_thread(worker.process.wait, timeout_s)
        finally:
            self.kill(name)
        return status

    async def serving(self, *names: str, timeout_s: float = 120.0) -> None:
        """Returns once each worker has written its `worker:` hash: model loaded, taking jobs.

        Raises RuntimeError with the end of its log if one ends, or needs longer than that.
        """
        deadline = time.monotonic() + timeout_s
        async with connect(self.url) as client:
            for name in names:
                worker = self.workers[name]
                while not await self._serves(client, worker):
                    if worker.process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"worker {name} did not start:\n{worker.last_words()}")
                    await asyncio.sleep(0.1)

    async def _serves(self, client: Redis, worker: Worker) -> bool:
        """By pid, since the hash of a killed worker of the same name lives on for a while."""
        async for key in client.scan_iter(Keys(self.queue).worker(f"{worker.name}.*")):
            pid: Any = await cast(Awaitable[Any], client.hget(key, "pid"))
            if pid == str(worker.pid).encode():
                return True
        return False


def end_on_signals() -> None:
    """SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that `with` blocks close."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, leave)


def guarded(main: Callable[[], int]) -> int:
    """Runs the body of a command; Ctrl-C ends it quietly with status 130."""
    end_on_signals()
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
