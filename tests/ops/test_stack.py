"""Nothing that the stack started outlives it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ops.lib.stack import Stack
from tests.ops.processes import alive, all_gone

ROOT = Path(__file__).parents[2]

# Starts a server and a stand-in for a worker, prints their pids, then waits for a signal.
PROGRAM = """
import signal, subprocess, sys, time
from pathlib import Path
from ops.lib.stack import Stack, Worker, guarded

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

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
        try:
            pids = [int(pid) for pid in program.stdout.readline().split()]
            assert len(pids) == 3 and all(map(alive, pids))
            program.send_signal(number)
            assert program.wait(60) == status
        finally:
            program.kill()
    assert all_gone(pids)


async def test_a_worker_of_the_same_name_is_waited_for_anew(queue: str) -> None:
    with Stack(None, queue) as stack:
        stack.start_worker("mac")
        await stack.serving("mac")
        stack.kill("mac")  # its hash stays for some seconds
        second = stack.start_worker("mac")
        await stack.serving("mac")
        assert "serving" in second.last_words()
        assert await stack.stop("mac") == 0
        pids = [stack.server_pid, second.pid]
    assert all_gone(pids)


async def test_a_worker_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with Stack(tmp_path / "no-model", "q") as stack:
        stack.start_worker("mac")
        with pytest.raises(RuntimeError, match="worker mac did not start:\n.*no-model"):
            await stack.serving("mac")
