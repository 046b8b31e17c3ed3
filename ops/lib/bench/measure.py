"""Statistics over rounds, and the report that a benchmark ends with."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table

import mlxq

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "redis")


class Spread(msgspec.Struct, frozen=True):
    """One number per round: their median, smallest and largest, to five digits."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        median, least, most = statistics.median(values), min(values), max(values)
        return cls(*(float(f"{value:.5g}") for value in (median, least, most)))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.min)}..{short(self.max)})"


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark found: tables for people, data for programs."""

    table: RenderableType
    data: dict[str, Any]

    def line(self) -> str:
        return msgspec.json.encode(self.data).decode()


def tell(news: str) -> None:
    """A line about how far the benchmark is, apart from its report."""
    print(news, file=sys.stderr, flush=True)


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of neighbours: one ratio per round."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def in_turn(sides: Iterable[str], number: int) -> list[str]:
    """The sides in the order of a round: the other way round in every second."""
    names = list(sides)
    return names[::-1] if number % 2 else names


def columns(*headings: str, title: str, caption: str | None = None) -> Table:
    """A table without rows: what they are of, and a number under each heading."""
    what, *numbers = headings
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(what, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def percentile(values: Sequence[float], percent: int) -> float:
    """Interpolated between the two nearest values, as numpy does."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def short(value: float) -> str:
    """Three digits, or more before the point."""
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def machine() -> dict[str, Any]:
    """Where the numbers come from; `load` is the number of processes that wanted to run."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "mlxq": mlxq.__version__,
    }


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in hundredths."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    command = ["ps", "-o", "cputime=", "-p", str(pid)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = 0.0
    for part in shown.strip().split(":"):
        seconds = 60 * seconds + float(part)
    return seconds
