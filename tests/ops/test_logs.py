"""A log is read while its process writes it."""

from __future__ import annotations

from pathlib import Path

from ops.lib.logs import whole_lines


def test_a_line_under_way_is_left_for_later(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b'{"event": "serving"}\n{"event": "adm')
    assert whole_lines(log) == [b'{"event": "serving"}']
    with log.open("ab") as file:
        file.write(b'itted"}\n')
    assert whole_lines(log) == [b'{"event": "serving"}', b'{"event": "admitted"}']


def test_an_empty_log_has_no_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.touch()
    assert whole_lines(log) == []
