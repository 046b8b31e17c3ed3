"""The fleet as a table for a terminal. Needs rich, so only the command line imports it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mlxq.producer.options import harmless
from mlxq.producer.status import Status, WorkerStatus
from mlxq.protocol.keys import LANES

COLUMNS = ("worker", "model", "slots", "tok/s", "jobs/s", "host", "pid", "version", "seen")


def render(status: Status) -> RenderableType:
    """Two lines about the queue, and a row for each worker."""
    lanes = "  ".join(f"{lane} {status.jobs[lane]}" for lane in LANES)
    wait_s = status.estimated_wait_s
    lines = [
        f"queue {status.queue}: {lanes} (queued + running), dead {status.dead}",
        f"waiting {status.waiting}, oldest {status.oldest_s:.1f} s, "
        f"estimated wait {'unknown' if wait_s is None else f'{wait_s:.1f} s'}",
    ]
    text = Text("\n".join(lines))
    if not status.workers:
        return Group(text, Text("no workers"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column)
    for worker in status.workers:
        table.add_row(*map(cell, _cells(worker, status.now_ms)))
    return Group(text, table)


def cell(text: str) -> Text:
    """What others wrote, as it is: no markup, and nothing that a terminal would obey."""
    return Text(harmless(text))


def _cells(worker: WorkerStatus, now_ms: int) -> tuple[str, ...]:
    seen_s = max(0, now_ms - worker.seen_ms) / 1000
    return (
        worker.name,
        worker.model or "-",
        f"{worker.running}/{worker.slots}" + (" draining" if worker.draining else ""),
        f"{worker.tokens_per_s:.1f}",
        f"{worker.jobs_per_s:.2f}",
        worker.host or "-",
        str(worker.pid or "-"),
        worker.version or "-",
        f"{seen_s:.0f} s ago" if worker.seen_ms else "-",
    )
