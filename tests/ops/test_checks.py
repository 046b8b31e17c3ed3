"""ops/test runs every stage, and fails as the first failing one does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ops.lib import checks
from ops.lib.checks import Stage
from tests.ops.processes import all_gone

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_all_stages_run_and_the_first_failure_counts(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        Stage("one", python("print('quiet')")),
        Stage("two", python("print('told'); raise SystemExit(4)")),
        Stage("three", python("raise SystemExit(3)")),
        Stage("four", python("print('seen'); print('= 7 passed in 1s =')"), shown=True),
    ]
    assert checks.check(stages) == 4
    lines = capsys.readouterr().out.splitlines()
    assert "quiet" not in lines
    assert "told" in lines and "seen" in lines
    assert lines[-1] == "= 7 passed in 1s ="
    assert sum(line.startswith("two ") and "FAILED (4)" in line for line in lines) == 2


def test_no_selected_test_is_a_failure_unless_it_may_be() -> None:
    nothing = python("raise SystemExit(5)")
    assert checks.run(Stage("all", nothing)).status == 5
    assert checks.run(Stage("chosen", nothing, may_be_empty=True)).status == 0


def test_ci_demands_redis_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    assert "tests on redis-server" not in [stage.name for stage in checks.stages([])]
    monkeypatch.setenv("CI", "true")
    [redis] = [stage for stage in checks.stages([]) if stage.name == "tests on redis-server"]
    assert redis.environment["MLXQ_TEST_SERVER"] == "redis"


def test_sigterm_ends_the_running_stage() -> None:
    code = """
import sys
from ops.lib.checks import Stage, check
from ops.lib.stack import guarded
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
stage = Stage("sleep", [sys.executable, "-c", child], shown=True)
raise SystemExit(guarded(lambda: check([stage])))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.strip().isdigit())
        os.kill(process.pid, signal.SIGTERM)
        process.stdout.read()
        assert process.wait() == 143
    assert all_gone([int(line)])
