"""How long a decode step takes: mlx-lm's BatchGenerator against the worker's batch.

A mix says how the rows choose their ids. Raw, ours and ours with greedy rows hold the same random
prompts and take turns, since a machine's speed drifts within seconds. The ratio of their median
step times in a round is what counts.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import cycle, islice

import mlx.core as mx
from rich.table import Table

from mlxq.worker.engine.request import SamplingParams
from ops.lib.bench.batches import GREEDY, Ask, Makers, Side, Timeline, prompts
from ops.lib.bench.measure import Spread, columns, in_turn, ratio, tell

WARM_STEPS = 5
SETTLE_STEPS, TURN_STEPS = 4, 12
"""Of a turn: those that get a side going again, as on CUDA graphs of others took the place of its
own; and timed ones."""

TEMPERATURES = (0.6, 0.8, 1.0, 1.2)
TOP_PS = (0.8, 0.9, 0.95)


def mixes(rows: int) -> dict[str, list[SamplingParams]]:
    """Per mix the parameters of every row."""
    warmth = list(islice(cycle(TEMPERATURES), rows))
    nucleus = list(islice(cycle(TOP_PS), rows))
    return {
        "greedy": [GREEDY] * rows,
        "seeded": [SamplingParams(temperature=t, seed=row) for row, t in enumerate(warmth)],
        "top_p": [
            SamplingParams(temperature=t, top_p=p, seed=row)
            for row, (t, p) in enumerate(zip(warmth, nucleus, strict=True))
        ],
        "penalties": [
            SamplingParams(
                temperature=t,
                top_p=p,
                seed=row,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.2,
            )
            for row, (t, p) in enumerate(zip(warmth, nucleus, strict=True))
        ],
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """batches: numbers of rows. steps: timed ones. prompt: ids per row."""

    batches: list[int]
    rounds: int
    steps: int
    prompt: int
    vocab: int


Times = dict[tuple[int, str, str], list[float]]
"""Median step times in ms, one per round, by batch, mix and side."""


def run(makers: Makers, plan: Plan) -> Times:
    times: Times = {}
    for rows in plan.batches:
        sides = {"raw": makers["raw"], "own": makers["own"], "own_greedy": makers["own"]}
        made = {name: make(rows) for name, make in sides.items()}
        for number in range(plan.rounds):
            for mix, params in mixes(rows).items():
                tell(f"batch {rows}, round {number + 1}: {mix}")
                asked = {"raw": params, "own": params, "own_greedy": [GREEDY] * rows}
                for name, taken_ms in step_ms(made, asked, plan, number).items():
                    times.setdefault((rows, mix, name), []).append(taken_ms)
    return times


def step_ms(
    sides: dict[str, Side], asked: dict[str, list[SamplingParams]], plan: Plan, number: int
) -> dict[str, float]:
    """For each side the median time of a step in which every row gets an id."""
    for name, side in sides.items():
        params = asked[name]
        ids = prompts(len(params), [plan.prompt], plan.vocab, number)
        tokens = 2 * plan.steps + WARM_STEPS + 100  # more than it takes
        side.admit([Ask(prompt, tokens, each) for prompt, each in zip(ids, params, strict=True)])
        Timeline().run_until(side, range(len(params)), WARM_STEPS)
    taken_ms: dict[str, list[float]] = {name: [] for name in sides}
    while any(len(taken) < plan.steps for taken in taken_ms.values()):
        number += 1
        for name in in_turn(sides, number):
            mx.synchronize()
            for _ in range(SETTLE_STEPS):
                sides[name].step()
            for _ in range(min(TURN_STEPS, plan.steps)):
                before_s = time.perf_counter()
                sides[name].step()
                taken_ms[name].append(1e3 * (time.perf_counter() - before_s))
    for side in sides.values():
        side.clear()
    return {name: statistics.median(taken) for name, taken in taken_ms.items()}


def data(times: Times) -> dict[str, dict[str, Spread]]:
    """By batch and mix: both times, raw to ours, and ours to our greedy as a speed."""
    found = {}
    for rows, mix in dict.fromkeys((rows, mix) for rows, mix, _ in times):
        raw, own = times[rows, mix, "raw"], times[rows, mix, "own"]
        found[f"b{rows}.{mix}"] = {
            "raw_ms": Spread.of(raw),
            "own_ms": Spread.of(own),
            "raw/own": ratio(raw, own),
            "own_greedy/own": ratio(times[rows, mix, "own_greedy"], own),
        }
    return found


def table(found: dict[str, dict[str, Spread]]) -> Table:
    shown = columns(
        *("batch and mix", "raw ms", "own ms", "raw/own", "own greedy/own"),
        title="a decode step: median (smallest..largest) of the rounds' medians",
        caption="raw/own: how many times faster than BatchGenerator with the same mix",
    )
    for name, spreads in found.items():
        shown.add_row(name, *map(str, spreads.values()))
    return shown
