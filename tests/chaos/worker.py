"""Synthetic worker processes, to be killed, frozen and made to hang."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.lib.logs import whole_lines
from tests.chaos.reader import GUARD_S
from tests.worker.processes import WorkerProcess

ROOT = Path(__file__).resolve().parents[2]


class SyntheticProcess(WorkerProcess):
    """`python -m ops.lib.synthetic` in a process of its own.

    url     where the worker finds its server; `direct` leads there without proxy or sentinels
    """

    def __init__(
        self, name: str, url: str, direct: str, queue: str, log: Path, *flags: str
    ) -> None:
        super().__init__("synthetic", direct, queue, name, log)
        self._command = [sys.executable, "-m", "ops.lib.synthetic", "--redis", url]
        self._command += ["--queue", queue, "--name", name, *flags]

    def start(self) -> SyntheticProcess:
        assert self.process is None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=ROOT)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """What the worker has logged, of all its runs."""
        for line in whole_lines(self.log):
            assert line.startswith(b"{"), f"{self.name} wrote to stderr:\n{self.log.read_text()}"
            yield json.loads(line)

    async def logged(self, event: str) -> None:
        """Returns once the worker has logged this."""
        async with asyncio.timeout(GUARD_S):
            while f'"event": "{event}"' not in self.log.read_text():
                await asyncio.sleep(0.01)

    def cpu_s(self) -> float:
        """Processor time that the process has used. 0.0 where there is no /proc."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return 0.0
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
