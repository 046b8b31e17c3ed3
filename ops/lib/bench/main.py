"""`ops/bench NAME`: runs one benchmark and prints its report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from ops.lib.bench import control, engine, sampling
from ops.lib.bench.measure import Report
from ops.lib.stack import guarded

BENCHMARKS = {"control": control, "engine": engine, "sampling": sampling}
FILE_COLUMNS = 120


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/bench", description="Runs one benchmark.")
    names = parser.add_subparsers(metavar="NAME", required=True)
    for name, benchmark in BENCHMARKS.items():
        options = names.add_parser(name, help=benchmark.HELP, description=benchmark.__doc__)
        options.set_defaults(measure=benchmark.measure)
        options.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there too")
        benchmark.add_options(options)
    arguments = parser.parse_args()
    return guarded(lambda: show(arguments))


def show(arguments: argparse.Namespace) -> int:
    report: Report = arguments.measure(arguments)
    # Rich takes a file or a pipe for 80 columns wide.
    Console(width=None if sys.stdout.isatty() else FILE_COLUMNS).print(report.table)
    line = report.line()
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0
