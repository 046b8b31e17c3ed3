"""Whether processes that a command started are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # A zombie waits for its new parent to reap it: it is dead.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def all_gone(pids: Iterable[int], wait_s: float = 30.0) -> bool:
    """Whether all have ended within `wait_s`: the guard kills a moment after its parent's end."""
    deadline = time.monotonic() + wait_s
    waiting = list(pids)
    while any(map(alive, waiting)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, waiting))
