"""Everything CI checks, stage by stage: style, types, tests, and the tests again on Redis 7.0.

All stages run even when one fails; the exit status is that of the first that failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from ops.lib import arguments
from ops.lib.bootstrap import ROOT
from ops.lib.stack import guarded


@dataclass(frozen=True)
class Stage:
    """One command.

    shown           its output is shown as it comes, not only when it fails
    may_be_empty    pytest's status for "no test selected" is no failure
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    shown: bool = False
    may_be_empty: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a stage ended. `closing` is the last line of what it printed."""

    stage: Stage
    status: int
    seconds: float
    closing: str

    def __str__(self) -> str:
        verdict = "ok" if self.status == 0 else f"FAILED ({self.status})"
        return f"{self.stage.name:<24} {verdict:<12} {self.seconds:6.1f} s"


def stages(pytest_arguments: Sequence[str]) -> list[Stage]:
    python = sys.executable
    # One more than there are cores: half of their time tests wait for servers and processes.
    workers = str(min(max(os.cpu_count() or 2, 2), 8) + 1)
    tests = [python, "-m", "pytest", "-n", workers, "--dist", "worksteal"]
    # The cores are taken by the processes; threads of BLAS would burn a third more in waiting.
    # Tests start hundreds of processes: images for CI often forbid the files that compile for all.
    cheap = {"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    found = [
        Stage("ruff check", [python, "-m", "ruff", "check", "."]),
        Stage("ruff format", [python, "-m", "ruff", "format", "--check", "."]),
        Stage("mypy", [python, "-m", "mypy"]),
        Stage("demo model", [python, str(ROOT / "ops" / "model")]),
        Stage("tests", [*tests, *pytest_arguments], cheap, shown=True),
    ]
    if shutil.which("redis-server") or os.environ.get("CI"):
        again = "server and not any_server and not model and not slow"
        command = [*tests, "-m", again, *pytest_arguments]
        redis = {"MLXQ_TEST_SERVER": "redis", **cheap}
        chosen = bool(pytest_arguments)
        found.append(Stage("tests on redis-server", command, redis, True, may_be_empty=chosen))
    return found


def run(stage: Stage) -> Outcome:
    """Runs one stage in the repository's root."""
    started = time.monotonic()
    process = subprocess.Popen(
        stage.command,
        cwd=ROOT,
        env={**os.environ, **stage.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    with process:
        try:
            for line in process.stdout or ():
                lines.append(line)
                if stage.shown:
                    print(line, end="", flush=True)
        except SystemExit:
            # Ctrl-C reaches the whole terminal group; SIGTERM only us. pytest stops its servers.
            process.send_signal(signal.SIGINT)
            raise
    if process.returncode != 0 and not stage.shown:
        print("".join(lines), end="")
    status = process.returncode
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and stage.may_be_empty:
        status = 0
    closing = next((line.rstrip() for line in reversed(lines) if line.strip()), "")
    return Outcome(stage, status, time.monotonic() - started, closing)


def main() -> int:
    return guarded(lambda: check(stages(arguments.test())))


def check(all_stages: Sequence[Stage]) -> int:
    """Runs every stage; returns the status of the first that failed, or 0."""
    outcomes = []
    for stage in all_stages:
        if stage.shown:
            print(f"--- {stage.name}", flush=True)
        outcome = run(stage)
        print(outcome, flush=True)
        outcomes.append(outcome)
    print("--- all stages")
    for outcome in outcomes:
        print(outcome)
    if not shutil.which("redis-server"):
        print("no redis-server on PATH: the tests ran on Valkey alone")
    for outcome in reversed([outcome for outcome in outcomes if outcome.stage.shown]):
        print(outcome.closing)
    return next((outcome.status for outcome in outcomes if outcome.status), 0)
