"""What arrivals do: long prompts that join rows which decode, and a burst of short ones.

Interference: how far apart the ids of the running rows get while the long prompts are read, and
how long the joiners wait for their first id. Burst: how long short prompts that arrive at once at
an idle engine wait. Both sides take turns, round by round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from rich.table import Table

from ops.lib.bench.batches import Ask, Makers, Side, Timeline, prompts
from ops.lib.bench.measure import Spread, columns, in_turn, percentile, ratio, tell

RUNNING_PROMPT = 128
BURST_LENGTHS = (16, 24, 32, 48, 64)
CALM_IDS = 40
ENDLESS = 2_000  # more than a round takes

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """running: rows that decode. joiners: prompts of `long` ids. burst: short prompts."""

    running: int
    joiners: int
    long: int
    burst: int
    rounds: int
    vocab: int


def interference(side: Side, plan: Plan, seed: int) -> Numbers:
    """Milliseconds. calm: between two ids of a running row while nothing joins."""
    running = range(plan.running)
    joining = range(plan.running, plan.running + plan.joiners)
    short = prompts(plan.running, [RUNNING_PROMPT], plan.vocab, seed)
    side.admit([Ask(ids, ENDLESS) for ids in short])
    Timeline().run_until(side, running, 3)
    calm = Timeline()
    calm.run_until(side, running, CALM_IDS)
    long = prompts(plan.joiners, [plan.long], plan.vocab, seed + 1)
    joined = Timeline()
    side.admit([Ask(ids, ENDLESS) for ids in long])
    joined.run_until(side, [*running, *joining], 1)
    side.clear()
    gaps = [1e3 * gap for row in running for gap in between(joined.at_s[row])]
    first = [1e3 * at_s for at_s in joined.first_s(joining)]
    calm_ms = percentile([1e3 * gap for gap in between(calm.at_s[0])], 50)
    return {
        "calm_ms": calm_ms,
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p95_ms": percentile(gaps, 95),
        "gap_max_ms": max(gaps),
        "gap_p95/calm": percentile(gaps, 95) / calm_ms,
        "join_mean_ms": sum(first) / len(first),
        "join_max_ms": max(first),
    }


def burst(side: Side, plan: Plan, seed: int) -> Numbers:
    """Milliseconds to the first id."""
    rows = range(plan.burst)
    asks = [Ask(ids, ENDLESS) for ids in prompts(plan.burst, BURST_LENGTHS, plan.vocab, seed)]
    arrived = Timeline()
    side.admit(asks)
    arrived.run_until(side, rows, 1)
    side.clear()
    first = [1e3 * at_s for at_s in arrived.first_s(rows)]
    return {
        "first_p50_ms": percentile(first, 50),
        "first_p95_ms": percentile(first, 95),
        "first_max_ms": max(first),
    }


def between(at_s: list[float]) -> list[float]:
    """From the start of the timeline on: the step that read a first chunk counts too."""
    return [later - earlier for earlier, later in pairwise([0.0, *at_s])]


CASES: dict[str, Callable[[Side, Plan, int], Numbers]] = {
    "interference": interference,
    "burst": burst,
}


def run(makers: Makers, plan: Plan) -> dict[str, dict[str, list[Numbers]]]:
    """By case and side, the numbers of each round."""
    slots = max(plan.running + plan.joiners, plan.burst)
    sides = {name: make(slots) for name, make in makers.items()}
    found: dict[str, dict[str, list[Numbers]]] = {
        case: {name: [] for name in sides} for case in CASES
    }
    for name, side in sides.items():
        for case, measure in CASES.items():
            tell(f"once before: {case}, {name}")
            measure(side, plan, 1_000)  # compiles kernels, and lets a pace be learned
    for number in range(plan.rounds):
        for case, measure in CASES.items():
            for name in in_turn(sides, number):
                tell(f"round {number + 1}: {case}, {name}")
                found[case][name].append(measure(sides[name], plan, number))
    return found


def data(found: dict[str, dict[str, list[Numbers]]]) -> dict[str, dict[str, Spread]]:
    """By case and number: both sides, and ours to raw within a round."""
    shown = {}
    for case, sides in found.items():
        for number in sides["raw"][0]:
            raw = [each[number] for each in sides["raw"]]
            own = [each[number] for each in sides["own"]]
            shown[f"{case}.{number}"] = {
                "raw": Spread.of(raw),
                "own": Spread.of(own),
                "own/raw": ratio(own, raw),
            }
    return shown


def table(found: dict[str, dict[str, Spread]]) -> Table:
    shown = columns(
        *("", "raw", "own", "own/raw"),
        title="arrivals: median (smallest..largest) of the rounds",
        caption="own/raw: below 1 is better than BatchGenerator",
    )
    for name, spreads in found.items():
        shown.add_row(name, *map(str, spreads.values()))
    return shown
