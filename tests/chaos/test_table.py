"""README.md lists every case."""

from __future__ import annotations

from tests.chaos.table import README, cases


def test_every_case_is_in_the_table() -> None:
    """`python -m tests.chaos.table` writes it."""
    text = README.read_text(encoding="utf-8")
    missing = [case.name for case in cases() if case.case not in text or case.mechanism not in text]
    assert not missing
