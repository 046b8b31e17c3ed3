"""The worker processes: each is started again when it ends, and must end as it should."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

from mlxq.worker.config import EXIT_DRAINED, EXIT_ENGINE_DIED
from ops.lib.bootstrap import ROOT
from ops.lib.soak.line import Line
from ops.lib.soak.news import News
from ops.lib.stack import Guard

MAX_BATCH = 8
STALL_S = 6.0  # longer than any freeze, so that only a hang is taken for one
DRAIN_S = 1.0
ENDS_IN_S = 20.0
LISTENS = "model_loaded"  # from this line of its log on a worker handles all signals
# What asyncio and Python say of a mistake that nobody handled.
COMPLAINTS = ("never retrieved", "never awaited", "Fatal Python error", "Segmentation fault")


class Member:
    """One place in the fleet: a worker process, and after its end the next.

    frozen      stopped by a signal; it does nothing until `thaw`
    """

    def __init__(
        self, name: str, line: Line, log: Path, news: News, guard: Guard, *flags: str
    ) -> None:
        self.name = name
        self.line = line
        self.log = log
        self.frozen = False
        self.may_break = False  # jobs of this round break or hang engines
        self._news = news
        self._guard = guard
        self._flags = flags
        self._process: Process | None = None
        self._told: list[str] = []
        self._closing = False
        self._pause = random.Random(name)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keeps a worker running until `close`."""
        while not self._closing:
            await self._live()
            if not self._closing:
                await asyncio.sleep(self._pause.uniform(0.05, 0.8))

    async def _live(self) -> None:
        """The life of one process."""
        self._told = []
        command = ["-m", "ops.lib.synthetic", "--redis", self.line.url, "--name", self.name]
        command += ["--max-batch", str(MAX_BATCH), "--stall-timeout-s", str(STALL_S)]
        command += ["--drain-timeout-s", str(DRAIN_S), *self._flags]
        with open(self.log, "wb") as log:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard.add(process.pid)
        self._process = process
        self._news.counts["worker starts"] += 1
        code = await process.wait()
        self._process, self.frozen = None, False
        self._guard.discard(process.pid)
        self._judge(code)

    def _judge(self, code: int) -> None:
        self._news.say(f"{self.name} ended with {code} {' '.join(self._told)}")
        allowed = {-signal.SIGKILL}
        if "drain" in self._told:
            allowed.add(EXIT_DRAINED)
        if self.may_break:
            allowed.add(EXIT_ENGINE_DIED)
        log = self.log.read_text(errors="replace")
        if "drain" in self._told and LISTENS not in log:
            allowed.add(-signal.SIGTERM)
        if code not in allowed:
            self._news.breach(f"{self.name} ended with {code}:\n{log[-3000:]}")
        for complaint in COMPLAINTS:
            if complaint in log:
                at = log.index(complaint)
                self._news.breach(f"{self.name} says:\n{log[max(0, at - 500) : at + 2500]}")

    def kill(self) -> None:
        if self._process:
            self._told.append("kill")
            self._process.kill()

    def freeze(self) -> None:
        if self._process and not self.frozen:
            self.frozen = True
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process and self.frozen:
            self._process.send_signal(signal.SIGCONT)
        self.frozen = False

    def drain(self, times: int = 1) -> None:
        """SIGTERM; a second one releases at once. The process must end soon."""
        if self._process:
            self._told.append("drain")
            for _ in range(times):
                self._process.terminate()

    def jump(self, number: signal.Signals) -> None:
        """One of the signals that make its clocks jump."""
        if self._process and LISTENS in self.log.read_text(errors="replace"):
            self._process.send_signal(number)

    async def ended(self, pid: int | None) -> bool:
        """Whether the process of that id ends in good time."""
        for _ in range(round(ENDS_IN_S / 0.1)):
            if pid is None or self.pid != pid:
                return True
            await asyncio.sleep(0.1)
        return False

    def close(self) -> None:
        self._closing = True
        self.kill()
