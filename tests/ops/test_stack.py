"""Nothing that the stack started outlives it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Starts a server and a stand-in for a worker, prints their pids, then waits for a signal.
PROGRAM = """
import subprocess, sys, time
from pathlib import Path
from ops.lib.stack import Stack, Worker, guarded

def main():
    with Stack(Path("no-model"), "q") as stack:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        stack.guard.add(child.pid)
        stack.workers["w"] = Worker("w", child, Path("/dev/null"))
        print(stack.server.process.pid, child.pid, stack.guard._process.pid, flush=True)
        time.sleep(600)
    return 0

raise SystemExit(guarded(main))
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # A zombie waits for its new parent to reap it: it is dead.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_nothing_is_left_behind(number: signal.Signals, status: int) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        program.send_signal(number)
        assert program.wait() == status
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
