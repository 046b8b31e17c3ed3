"""`ops/fuzz [TARGET …] [--seconds S]`: runs targets, one after the other, until the time is up.

With atheris (pip install atheris) coverage of mlxq's own code leads the way; without it,
hypothesis draws and shrinks. A failure prints its input and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed as seeded, settings

from ops.lib.bootstrap import ROOT
from ops.lib.fuzz.inputs import SEEDS, inputs
from ops.lib.fuzz.targets import TARGETS

ROUND = 200
LONGEST_INPUT = 4_096


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=30.0, help="for each target")
    parser.add_argument("--seed", type=int, help="of the first round; random if not given")
    parser.add_argument("--engine", choices=["auto", "atheris", "hypothesis"], default="auto")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    engine = chosen.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "hypothesis"
    seed = random.randrange(2**31) if chosen.seed is None else chosen.seed
    run = with_atheris if engine == "atheris" else with_hypothesis
    failed = []
    for name in chosen.targets or TARGETS:
        started = time.monotonic()
        outcome = run(name, chosen.seconds, seed)
        print(f"{name:<12} {engine} seed {seed} {time.monotonic() - started:.0f} s: {outcome}")
        if outcome.startswith("FAILED"):
            failed.append(name)
    return 1 if failed else 0


def with_hypothesis(name: str, seconds: float, seed: int) -> str:
    """Rounds of ROUND inputs, each with the next seed."""
    until = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < until:
        try:
            one_round(name, seed + rounds)
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            return f"FAILED with seed {seed + rounds}: {type(error).__name__}: {error}\n{notes}"
        rounds += 1
    return f"{rounds * ROUND:,} inputs"


def one_round(name: str, seed: int) -> None:
    target = TARGETS[name]

    @seeded(seed)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(name))
    def once(data: bytes) -> None:
        target(data)

    once()


def with_atheris(name: str, seconds: float, seed: int) -> str:
    """In a process of its own, which libFuzzer ends; it writes what fails to crash-*."""
    with tempfile.TemporaryDirectory() as folder:
        for number, known in enumerate(SEEDS.get(name, ())):
            Path(folder, f"seed-{number}").write_bytes(known)
        command = [sys.executable, "-m", "ops.lib.fuzz.guided", name, folder]
        command += [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}"]
        command += [f"-max_len={LONGEST_INPUT}", "-print_final_stats=1", "-timeout=10"]
        command += ["-rss_limit_mb=2048", f"-artifact_prefix={ROOT}/"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    said = done.stdout + done.stderr
    if done.returncode != 0:
        return f"FAILED\n{said[-4_000:]}"
    stats = [line for line in said.splitlines() if "number_of_executed_units" in line]
    return f"{int(stats[0].split()[-1]):,} inputs" if stats else "no statistics"


if __name__ == "__main__":
    sys.exit(main())
