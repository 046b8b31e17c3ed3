"""Processor time and memory of processes, from /proc; elsewhere there is nothing to tell."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float | None:
    """Seconds of processor time used so far; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float | None:
    """Memory in use, in MiB; None if there is no such process."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
