"""`python -m tests.chaos.table`: runs every case and writes what it measured into README.md.

A row is made of the test's docstring (what happens; the promises it tests; what must be taken out
to see it fail) and of the recovery that `House` has measured. Arguments go to pytest.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
BEGIN, END = "<!-- cases -->\n", "<!-- end of cases -->\n"

_DETAIL = re.compile(r"Promise: (?P<promises>[\d ]+)\. .*?Fails without:? (?P<mechanism>.+)")


class Case(NamedTuple):
    """One test function: what its docstring says."""

    name: str
    case: str
    promises: str
    mechanism: str


def cases() -> Iterator[Case]:
    """All cases, in the order of the files and of their text. ValueError: one lacks a part."""
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
                summary, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
                detail = _DETAIL.search(" ".join(rest.split()))
                if detail is None:
                    raise ValueError(f"{path.name}: {node.name} does not say what it tests")
                promises = detail["promises"].replace(" ", ", ")
                name = f"{path.name}::{node.name}"
                yield Case(name, " ".join(summary.split()), promises, detail["mechanism"])


class Recorder:
    """A pytest plugin: the recovery of every test that passed, by its name with parameters."""

    def __init__(self) -> None:
        self.recovery: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            name = report.nodeid.rpartition("/")[2]
            self.recovery[name] = str(dict(report.user_properties).get("recovery_leases", ""))


def rows(recovery: dict[str, str]) -> Iterator[str]:
    yield "| case | promise | recovery, leases | fails without |"
    yield "|---|---|---|---|"
    for case in cases():
        measured = {
            name.partition("[")[2].rstrip("]"): leases
            for name, leases in sorted(recovery.items())
            if name.partition("[")[0] == case.name
        }
        values = [f"{which}: {leases}" if which else leases for which, leases in measured.items()]
        shown = "<br>".join(value for value in values if value)
        mechanism = case.mechanism.replace("|", "\\|")
        yield f"| {case.case} | {case.promises} | {shown} | {mechanism} |"


def main(arguments: Sequence[str]) -> int:
    recorder = Recorder()
    cases_only = [str(FOLDER), "--ignore", str(FOLDER / "test_table.py"), "-q"]
    status = pytest.main([*cases_only, *arguments], plugins=[recorder])
    if status == 0:
        before, _, rest = README.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        table = "".join(f"{row}\n" for row in rows(recorder.recovery))
        README.write_text(f"{before}{BEGIN}{table}{END}{after}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
