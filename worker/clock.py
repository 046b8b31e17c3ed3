"""Seconds that also pass while the machine sleeps: a lease does not stop for a closed lid."""

from __future__ import annotations

import time

# Linux stops CLOCK_MONOTONIC in suspend and has CLOCK_BOOTTIME; macOS counts sleep in
# CLOCK_MONOTONIC, while Python's time.monotonic() there does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """A steady clock for durations, in seconds, sleep included."""
    return time.clock_gettime(_CLOCK)
