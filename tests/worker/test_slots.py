"""How many jobs a worker may ask for, and of which lanes."""

from __future__ import annotations

import pytest

from mlxq.protocol.keys import LANES
from mlxq.protocol.scripts import Taken
from mlxq.worker.rows import Row, Rows
from mlxq.worker.slots import ALL_LANES, MAX_BEYOND, Slots, Wanted


class Held:
    """Slots and the rows that hold them: h, n or l for the lane of each."""

    def __init__(self, max_batch: int, lanes: str = "", *, need: int = 0, budget: int = 0) -> None:
        self.rows = Rows(on_change=lambda rows: self.slots.changed())
        self.slots = Slots(max_batch, budget_bytes=budget or 2**62, usual_bytes=need)
        self.slots.add(self.rows, lambda: None)
        self.add(lanes, need)

    def add(self, lanes: str, need: int = 0) -> None:
        for letter in lanes:
            [lane] = [lane for lane in LANES if lane[0] == letter]
            row = Row(Taken(f"job{len(self.rows)}", 1, 0, 0, False, b"{}", lane))
            self.rows.add(row)
            self.slots.admitted(row, need)

    def end(self, number: int) -> None:
        [row] = [row for row in self.rows if row.key.job_id == f"job{number}"]
        row.fail("internal", "")
        self.rows.ended(row)


@pytest.mark.parametrize(
    ("slots", "lanes", "wanted"),
    [
        (2, "", Wanted(2)),
        (2, "l", Wanted(1)),
        (2, "ll", Wanted(1, 2)),
        (2, "nn", Wanted(1, 1)),
        (2, "hn", Wanted(1, 1)),
        (2, "hh", Wanted(0, 0)),
        (2, "hl", Wanted(1, 2)),
        # The rows without a slot are the lowest: what runs decides.
        (5, "hhhhhl", Wanted(0, 0)),
        (5, "hhhhnl", Wanted(0, 1)),
        (8, "hhhhhhhnl", Wanted(1, 1)),
        (8, "hhhhhhhhl", Wanted(0, 0)),
        (8, "hhhhhhlllh", Wanted(0)),  # two beyond are enough
        (1, "l", Wanted(1, 2)),
        (1, "lh", Wanted(0)),
    ],
)
def test_only_a_higher_lane_than_one_that_runs_is_asked_beyond_the_slots(
    slots: int, lanes: str, wanted: Wanted
) -> None:
    found = Held(slots, lanes).slots.wanted
    assert (found.jobs, found.jobs and found.lanes) == (wanted.jobs, wanted.jobs and wanted.lanes)


def test_few_rows_are_beyond_the_slots_however_many_there_are() -> None:
    held = Held(1024, "l" * 1024)
    while held.slots.wanted.jobs:
        held.add("h")
    assert held.slots.beyond == MAX_BEYOND


def test_nothing_is_asked_beyond_the_slots_beside_a_take_under_way() -> None:
    held = Held(2, "l")
    with held.slots.reserve() as wanted:
        assert wanted == Wanted(1, ALL_LANES)
        assert held.slots.wanted.jobs == 0
    held.add("l")
    woken: list[bool] = []
    with held.slots.reserve() as wanted:
        assert wanted == Wanted(1, 2)
        assert not held.slots.wants(lambda: woken.append(True))
    assert woken == [True]


def test_memory_bounds_what_is_asked_for() -> None:
    held = Held(8, need=100, budget=1000)
    assert held.slots.free == 8
    held.add("nn", 400)
    assert held.slots.free == 1  # of 1000, 800 are promised; the mean need has grown to 170
    held.add("n", 200)
    assert held.slots.free == 0
    assert held.slots.wanted == Wanted(1, 1)
    held.add("h", 10)
    assert held.slots.wanted.jobs == 0  # more is promised than there is
    held.end(0)
    assert held.slots.free == 2


def test_an_idle_worker_asks_for_one_job_however_large_they_are() -> None:
    held = Held(8, need=5000, budget=1000)
    assert held.slots.wanted == Wanted(1)
    with held.slots.reserve():
        assert held.slots.free <= 0
    held.add("n", 900)
    assert held.slots.free == 0


def test_a_row_that_is_not_admitted_yet_counts_as_the_mean_of_the_last() -> None:
    held = Held(8, need=100, budget=1000)
    held.rows.add(Row(Taken("new", 1, 0, 0, False, b"{}")))
    assert held.slots.free == 7
    held.add("n", 800)
    assert held.slots.free == 0


def test_an_unlimited_budget_asks_for_all_slots() -> None:
    held = Held(8, "n", need=10**6)
    assert held.slots.free == 7


def test_what_was_given_back_for_want_of_memory_is_not_asked_for_again() -> None:
    held = Held(8, "nnl")
    held.slots.give_back(1)
    assert held.slots.free == 0
    held.end(2)
    assert held.slots.free == 0
    held.end(1)
    assert held.slots.free == 7


def test_a_worker_that_gave_back_all_it_had_asks_again() -> None:
    held = Held(8, "l")
    held.slots.give_back(1)
    held.end(0)
    assert held.slots.free == 8
