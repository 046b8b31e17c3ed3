"""A short soak: one round of random faults over real worker processes, every promise checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import Server, binary

ROOT = Path(__file__).parents[2]
SOAK = "from ops.lib.soak.main import main; raise SystemExit(main())"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_round_of_random_faults_breaks_no_promise(server: Server) -> None:
    """`ops/soak` for as long as one likes; a violation prints what it takes to see it again."""
    kind = "redis" if server.path.endswith("redis-server") else "valkey"
    assert server.path == binary()
    command = [sys.executable, "-c", SOAK, "--seed", "6", "--rounds", "1", "--workers", "3"]
    command += ["--jobs", "140", "--seconds", "8", "--server", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert numbers["soak"] == "ok"
    assert numbers["rounds"] == 1
    assert numbers["jobs"] >= 130  # a submit that met an outage may have been refused
    assert numbers["events"] > 2 * numbers["jobs"]
    assert numbers["readers"] >= numbers["jobs"]
    assert numbers["reader reconnects"] > 0
    assert len(numbers["faults"]) >= 5
