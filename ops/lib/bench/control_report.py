"""The numbers of the control-plane benchmark as tables and data, beside what they should reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table

from ops.lib.bench.measure import Report, Spread, short

Numbers = dict[str, float]


class Aim(NamedTuple):
    """What the median of a number should reach: at `least`, or at `most`."""

    name: str
    label: str
    least: float = 0.0
    most: float = float("inf")

    def met(self, value: float) -> bool:
        return self.least <= value <= self.most

    def verdict(self, value: float) -> str:
        bound = f">= {self.least:,g}" if self.least else f"<= {self.most:,g}"
        return f"{self.label} {bound}: {'met' if self.met(value) else 'missed'}"


AIMS = (
    Aim("b128.tokens_per_s", "tokens/s at batch 128", least=40_000),
    Aim("b128.worker_us", "worker CPU us/token at batch 128, full speed", most=12),
    Aim("paced.worker_us", "worker CPU us/token at batch 128, paced", most=12),
    Aim("calm.p99_ms", "engine to iterator, p99 ms", most=5),
    Aim("starts.start_ms", "submit to start, 16 in flight, p50 ms", most=3),
    Aim("drain128.jobs_per_s", "jobs/s drained at batch 128", least=2_500),
)


class Line(NamedTuple):
    """One line of the second table: a number, and the plain one beside it."""

    label: str
    name: str
    beside: str = ""


LINES = (
    Line("batch 128: tokens/s, beside PUBLISH in a pipeline", "b128.tokens_per_s", "plain.publish"),
    Line("batch 128: tokens/s, beside a plain subscriber", "b128.tokens_per_s", "plain.receive"),
    Line("2,000 tokens/s: engine to iterator, p50 ms", "calm.p50_ms", "plain.p50_ms"),
    Line("2,000 tokens/s: engine to iterator, p99 ms", "calm.p99_ms", "plain.p99_ms"),
    Line("16 jobs of 100 ms in flight: jobs/s", "starts.jobs_per_s"),
    Line("  submit to start, p50 ms", "starts.start_ms"),
    Line("  submit to `started` read, p50 ms", "starts.read_ms"),
    Line("16 one-token jobs in flight: jobs/s", "short.jobs_per_s"),
    Line("  submit to start, p50 ms", "short.start_ms"),
    Line("  CPU us/job: worker", "short.worker_us"),
    Line("  CPU us/job: server", "short.server_us"),
    Line("  CPU us/job: submitter and reader", "short.reader_us"),
    Line("one-token jobs drained at batch 32: jobs/s", "drain32.jobs_per_s"),
    Line("one-token jobs drained at batch 128: jobs/s", "drain128.jobs_per_s"),
    Line("  CPU us/job: worker", "drain128.worker_us"),
    Line("  CPU us/job: server", "drain128.server_us"),
)


def report(rounds: Sequence[Numbers], streams: dict[str, str], about: dict[str, Any]) -> Report:
    """`streams`: labels of the token loads, by the beginning of their numbers' names."""
    spreads = {name: Spread.of([numbers[name] for numbers in rounds]) for name in rounds[0]}
    ratios = {
        f"{name}/{beside}": Spread.of([numbers[name] / numbers[beside] for numbers in rounds])
        for _, name, beside in LINES
        if beside
    }
    data = {
        "benchmark": "control",
        "rounds": len(rounds),
        **spreads,
        "ratios": ratios,
        "targets_met": {aim.name: aim.met(spreads[aim.name].median) for aim in AIMS},
        **about,
    }
    return Report(Group(tokens_table(spreads, streams), lines_table(spreads, ratios)), data)


def tokens_table(spreads: dict[str, Spread], streams: dict[str, str]) -> Table:
    shown = table(
        "Tokens from the engine to a subscriber: median (smallest..largest) of all rounds",
        *("tokens/s", "ids/event", "CPU us/token: worker", "server", "reader"),
    )
    for name, label in streams.items():
        medians = {
            part: short(spreads[f"{name}.{part}"].median)
            for part in ("ids_per_event", "server_us", "reader_us")
        }
        shown.add_row(
            label,
            str(spreads[f"{name}.tokens_per_s"]),
            medians["ids_per_event"],
            str(spreads[f"{name}.worker_us"]),
            medians["server_us"],
            medians["reader_us"],
        )
    return shown


def lines_table(spreads: dict[str, Spread], ratios: dict[str, Spread]) -> Table:
    shown = table("Latency and jobs", "mlxq", "redis-py alone", "ratio")
    for label, name, beside in LINES:
        plain = (str(spreads[beside]), str(ratios[f"{name}/{beside}"])) if beside else ()
        shown.add_row(label, str(spreads[name]), *plain)
    shown.caption = "\n".join(aim.verdict(spreads[aim.name].median) for aim in AIMS)
    shown.caption_justify = "left"
    return shown


def table(title: str, *headings: str) -> Table:
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for heading in headings:
        shown.add_column(heading, justify="right")
    return shown
