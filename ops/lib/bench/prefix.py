"""What the prefix cache saves: prompts that share a long beginning, one after the other.

The same batch with its prefix cache and without, in turns. In a round every prompt has the same
first ids, new for the round, and an end of its own; the first prompt finds nothing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from rich.table import Table

from ops.lib.bench.batches import Ask, OwnSide, Side, Timeline
from ops.lib.bench.measure import Report, Spread, columns, in_turn, ratio, tell
from ops.lib.random_model import vocab_of

OWN_IDS = 32  # behind the shared ones, in each prompt
CACHE_BYTES = 2 << 30


def measure(model: Path, options: argparse.Namespace) -> Report:
    sides: dict[str, Side] = {
        "cold": OwnSide(model, 8, prefix_cache=0),
        "warm": OwnSide(model, 8, prefix_cache=CACHE_BYTES),
    }
    vocab = vocab_of(model)
    first_ms: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name in in_turn(sides, number + 1):
            tell(f"round {number}: {name}" if number else f"once before: {name}")
            shared, ends = asked(options.shared, options.turns, vocab, number)
            taken = [first(sides[name], shared + end) for end in ends]
            if number:  # the first round compiles, and lets a pace be learned
                first_ms[name].append(sum(taken[1:]) / (len(taken) - 1))
    found = {name: Spread.of(values) for name, values in first_ms.items()}
    found["cold/warm"] = ratio(*first_ms.values())
    return Report(table(found, options.shared), {"shared": options.shared, **found})


def asked(shared: int, turns: int, vocab: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """The ids in common, and the end of each prompt; the first of them is not counted."""
    choice = random.Random(seed)

    def ids(number: int) -> list[int]:
        return [choice.randrange(3, vocab) for _ in range(number)]

    return ids(shared), [ids(OWN_IDS) for _ in range(turns + 1)]


def first(side: Side, prompt: list[int]) -> float:
    """Milliseconds to the first id of a prompt at an idle batch; it ends with that id."""
    arrived = Timeline()
    side.admit([Ask(prompt, 1)])
    arrived.run_until(side, [0], 1)
    side.clear()
    return 1e3 * arrived.at_s[0][0]


def table(found: dict[str, Spread], shared: int) -> Table:
    shown = columns(
        *("", "without ms", "with the cache ms", "times faster"),
        title=f"first id of a prompt that shares {shared} ids with the one before",
    )
    shown.add_row("mean of a round's prompts", *map(str, found.values()))
    return shown
