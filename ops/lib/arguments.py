"""The command lines of ops/demo, ops/test and ops/model. Standard library only.

The commands read them before they set anything up: --help and a bad flag install nothing.
"""

from __future__ import annotations

import argparse
import sys

LEAST_TOKENS = 48  # of a job of the demo: half of it is there when a worker is killed


def demo() -> argparse.Namespace:
    """`plain` and `max_tokens`. Leaves the process for --help and for what it cannot read."""
    parser = argparse.ArgumentParser(
        prog="ops/demo",
        description="Eight prompts stream from two workers; one is aborted, one worker is killed, "
        "and the other goes on with its jobs. Brings its own server and a small real model.",
    )
    parser.add_argument("--plain", action="store_true", help="print lines: for logs and CI")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="per job")
    arguments = parser.parse_args()
    if arguments.max_tokens < LEAST_TOKENS:
        parser.error(f"--max-tokens must be at least {LEAST_TOKENS}: a kill in mid-stream")
    return arguments


def test() -> list[str]:
    """What goes to pytest."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(
            "usage: ops/test [-h] [PYTEST ARGUMENT ...]\n\n"
            "Runs everything CI checks: ruff, mypy, all tests, and those with a server once more\n"
            "on redis-server where there is one. Arguments go to pytest (see pytest --help), such\n"
            "as tests/producer, -x or -m 'not slow'."
        )
        sys.exit(0)
    return sys.argv[1:]


def model() -> None:
    """Takes no argument."""
    argparse.ArgumentParser(
        prog="ops/model",
        description="Prints the folder of the demo model, SmolLM2-135M-Instruct; fetches it "
        "(93 MB) and converts it the first time. The cache is $MLXQ_CACHE or ~/.cache/mlxq.",
    ).parse_args()
