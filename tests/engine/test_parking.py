"""Priorities: who gets a slot, who is parked for whom, and that no row's output shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxq.worker.engine.memory import measure
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.pace import Pace
from mlxq.worker.engine.request import Logprob, SamplingParams
from mlxq.worker.engine.row_cache import CacheOptions
from tests.engine.rig import (
    GREEDY,
    Rig,
    greedy_reference,
    prompt_of,
    request,
    run,
    settled_rig,
)
from tests.engine.tiny import make_tiny_model

HIGH, NORMAL, LOW = 0, 1, 2
SEEDED = SamplingParams(
    temperature=1.1, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.4, seed=11, logprobs=2
)


def alike(some: list[Logprob], others: list[Logprob]) -> bool:
    """Equal up to the rounding of sums in another order."""
    flat = [
        [value for each in reports for value in (each.logprob, *sum(each.top, ()))]
        for reports in (some, others)
    ]
    return flat[0] == pytest.approx(flat[1], abs=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_parked_row_goes_on_as_if_nothing_had_happened(
    loaded: LoadedModel, sampling: SamplingParams
) -> None:
    low = request("low", prompt_of(21), max_tokens=30, sampling=sampling, priority=LOW)
    alone = Rig(loaded)
    alone.admit(low)
    expected = alone.finish()["low"]
    for steps in (1, 2, 3, 9, 29):
        rig = Rig(loaded, max_batch=1)
        rig.admit(low)
        rig.step_until("low", steps)
        rig.admit(request("high", prompt_of(12, 1), max_tokens=6, priority=HIGH))
        rig.step_until("high", 6)
        assert len(rig.ids["low"]) <= steps + 1, "it has no slot"
        rig.finish()
        assert rig.ids["low"] == expected, f"parked after {steps}"
        assert alike(rig.logprobs["low"], alone.logprobs["low"])
        assert rig.ids["high"] == greedy_reference(loaded, prompt_of(12, 1), 6)
        assert rig.finishes() == {"low": "length", "high": "length"}


@pytest.mark.parametrize(
    "config",
    [
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "falcon_h1"},
    ],
    ids=["sliding window", "hybrid"],
)
def test_any_kind_of_cache_can_be_parked(tmp_path: Path, config: dict[str, Any]) -> None:
    other = load_model(str(make_tiny_model(tmp_path, config=config)))
    rig = Rig(other, max_batch=3)
    lengths = (5, 19, 33)
    for index, length in enumerate(lengths):
        rig.admit(request(str(index), prompt_of(length, index), max_tokens=24, priority=LOW))
    rig.step_until("2", 3)
    for index in range(3, 6):
        rig.admit(request(str(index), prompt_of(7, index), max_tokens=9, priority=HIGH))
        rig.step(2)
    rig.finish()
    for index, length in enumerate((*lengths, 7, 7, 7)):
        count = 24 if index < 3 else 9
        expected = greedy_reference(other, prompt_of(length, index), count)
        assert rig.ids[str(index)] == expected, f"row {index}"


def test_a_row_with_quantised_layers_can_be_parked(tmp_path: Path) -> None:
    config = {"head_dim": 32, "num_hidden_layers": 3}
    loaded = load_model(str(make_tiny_model(tmp_path, config=config)))
    low = request("low", prompt_of(70), max_tokens=30, priority=LOW)
    options = CacheOptions(kv_bits=8)
    expected = run(loaded, low, options=options)["low"]
    rig = Rig(loaded, max_batch=2, options=options)
    rig.admit(low, request("beside", prompt_of(9, 3), max_tokens=60, priority=NORMAL))
    rig.step_until("low", 5)
    rig.admit(request("high", prompt_of(12, 1), max_tokens=6, priority=HIGH))
    assert rig.finish()["low"] == expected
    assert list(rig.ends) == ["high", "low", "beside"]


@pytest.mark.parametrize("length", [1, 2, 20])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_row_that_has_just_joined_can_be_parked(
    tmp_path: Path, bits: int | None, length: int
) -> None:
    """It may hold nothing yet; its memory is asked for all the same."""
    config = {"head_dim": 32, "num_hidden_layers": 3}
    loaded = load_model(str(make_tiny_model(tmp_path, config=config)))
    low = request("low", prompt_of(length), max_tokens=5, priority=LOW)
    options = CacheOptions(kv_bits=bits)
    expected = run(loaded, low, options=options)["low"]
    for steps in range(8):
        rig = Rig(loaded, max_batch=1, options=options)
        rig.admit(low)
        rig.step(steps)
        assert rig.batch.kv_bytes >= 0
        rig.admit(request("high", prompt_of(6, 1), max_tokens=3, priority=HIGH))
        assert rig.finish()["low"] == expected


def test_rows_that_are_parked_together_are_no_step_of_their_own(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds the step in flight read already: that takes no time, and is not measured."""
    rows: list[int] = []
    counted = Pace.step

    def step(self: Pace, seconds: float, chunk: int | None, *, decoding: int) -> None:
        rows.append(decoding)
        counted(self, seconds, chunk, decoding=decoding)

    monkeypatch.setattr(Pace, "step", step)
    rig = Rig(loaded, max_batch=3)
    rig.admit(*(request(f"{n}", prompt_of(5, n), max_tokens=60, priority=LOW) for n in range(3)))
    rig.step(20)
    rig.admit(*(request(f"h{n}", prompt_of(5, n), max_tokens=9, priority=HIGH) for n in range(3)))
    rig.finish()
    assert rows and 0 not in rows


def test_rows_with_nothing_to_read_join_at_once(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=32)
    rig.admit(*(request(str(n), [5 + n], max_tokens=4) for n in range(32)))
    rig.step(2)
    assert len(rig.ids) == 32
    rig.finish()
    for n in range(32):
        assert rig.ids[str(n)] == greedy_reference(loaded, [5 + n], 4)


def test_the_last_row_of_the_lowest_priority_makes_room(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=4)
    for name, priority in (("a", NORMAL), ("b", LOW), ("c", LOW), ("d", NORMAL)):
        rig.admit(request(name, prompt_of(5), max_tokens=60, priority=priority))
    rig.step_until("d", 2)
    rig.admit(request("high", prompt_of(6), max_tokens=60, priority=HIGH))
    rig.step_until("high", 2)
    before = {name: len(ids) for name, ids in rig.ids.items()}
    rig.step(3)
    grown = {name for name, ids in rig.ids.items() if len(ids) > before[name]}
    assert grown == {"a", "b", "d", "high"}


def test_rows_of_the_same_priority_wait_for_each_other(loaded: LoadedModel) -> None:
    for priority in (HIGH, NORMAL, LOW):
        rig = Rig(loaded, max_batch=1)
        rig.admit(request("first", prompt_of(5), max_tokens=20, priority=priority))
        rig.step_until("first", 2)
        rig.admit(request("second", prompt_of(5), max_tokens=2, priority=priority))
        rig.step_until("first", 20)
        assert "second" not in rig.ids


def test_who_waits_goes_by_priority_then_by_arrival(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=1)
    order = ("low 1", "normal 1", "high 1", "normal 2", "high 2", "low 2")
    rig.admit(request("running", prompt_of(4), max_tokens=8, priority=HIGH))
    rig.step_until("running")
    for name in order:
        priority = {"high": HIGH, "normal": NORMAL, "low": LOW}[name.split()[0]]
        rig.admit(request(name, prompt_of(4), max_tokens=2, priority=priority))
    rig.finish()
    assert list(rig.ends) == [
        "running",
        *("high 1", "high 2", "normal 1", "normal 2", "low 1", "low 2"),
    ]


def test_a_parked_row_goes_on_before_later_ones_of_its_priority(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=1)
    rig.admit(request("parked", prompt_of(5), max_tokens=20, priority=LOW))
    rig.step_until("parked", 3)
    rig.admit(
        request("later", prompt_of(5, 1), max_tokens=3, priority=LOW),
        request("high", prompt_of(6), max_tokens=4, priority=HIGH),
        request("normal", prompt_of(6), max_tokens=4, priority=NORMAL),
    )
    rig.finish()
    assert list(rig.ends) == ["high", "normal", "parked", "later"]


def test_a_long_prefill_gives_way_and_goes_on_where_it_was(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=1)
    rig.admit(request("low", prompt_of(160), max_tokens=5, priority=LOW))
    rig.step(8)
    rig.admit(request("high", prompt_of(4, 1), max_tokens=3, priority=HIGH))
    rig.step_until("high", 3)
    before = rig.steps
    rig.step_until("low")
    assert rig.steps - before <= 160 // 16 - 8 + 3, "ids were read twice"
    rig.finish()
    assert rig.ids["low"] == greedy_reference(loaded, prompt_of(160), 5)
    assert rig.ids["high"] == greedy_reference(loaded, prompt_of(4, 1), 3)


def test_the_prompts_of_a_higher_priority_are_read_first(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=4)
    rig.admit(request("low", prompt_of(160), priority=LOW))
    rig.step(2)
    rig.admit(request("high", prompt_of(160, 1), priority=HIGH))
    rig.step(160 // 16 + 2)
    assert len(rig.ids["high"]) == 1 and "low" not in rig.ids


def test_a_row_that_ends_while_it_is_parked_is_not_lost(loaded: LoadedModel) -> None:
    """Its last id was in flight when its slot was wanted."""
    for count in range(1, 6):
        rig = Rig(loaded, max_batch=1)
        rig.admit(request("low", prompt_of(5), max_tokens=count, priority=LOW))
        rig.step(3)
        rig.admit(request("high", prompt_of(6), max_tokens=2, priority=HIGH))
        rig.finish()
        assert rig.ids["low"] == greedy_reference(loaded, prompt_of(5), count)
        assert rig.ids["high"] == greedy_reference(loaded, prompt_of(6), 2)


def test_a_parked_row_can_be_cancelled(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=1)
    rig.admit(request("low", prompt_of(5), max_tokens=50, priority=LOW))
    rig.step_until("low", 3)
    rig.admit(request("high", prompt_of(6), max_tokens=5, priority=HIGH))
    rig.step_until("high")
    rig.cancel("low")
    rig.finish()
    assert rig.finishes() == {"high": "length"}
    assert rig.batch.kv_bytes == 0


def budget_of(loaded: LoadedModel, rows: int, positions: int) -> dict[str, Any]:
    """The budget that just holds so many rows of that length."""
    cost = measure(loaded.network)
    return {"kv_cost": cost, "budget_bytes": cost.of_batch(rows, positions)}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_without_memory_for_both_the_row_is_given_back(
    loaded: LoadedModel, sampling: SamplingParams
) -> None:
    low = request("low", prompt_of(40), max_tokens=40, sampling=sampling, priority=LOW)
    expected = run(loaded, low)["low"]
    rig = Rig(loaded, max_batch=8, **budget_of(loaded, 1, 80))
    rig.admit(low)
    rig.step_until("low", 7)
    rig.admit(request("high", prompt_of(30, 1), max_tokens=5, priority=HIGH))
    rig.finish()
    assert rig.finishes() == {"low": "preempted", "high": "length"}
    made = rig.ids["low"]
    assert 7 <= len(made) <= 8 and made == expected[: len(made)]
    again = request(
        "low", prompt_of(40), generated=made, max_tokens=40, sampling=sampling, priority=LOW
    )
    assert made + run(loaded, again)["low"] == expected, "another worker goes on"


def test_a_row_waits_until_its_memory_is_free(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=8, **budget_of(loaded, 2, 40))
    rig.admit(*(request(str(n), prompt_of(30, n), max_tokens=10) for n in range(5)))
    most = 0
    while rig.batch.busy:
        before = {name: len(ids) for name, ids in rig.ids.items()}
        rig.step()
        most = max(most, sum(len(ids) > before.get(name, 0) for name, ids in rig.ids.items()))
    assert most == 2
    for n in range(5):
        assert rig.ids[str(n)] == greedy_reference(loaded, prompt_of(30, n), 10)


def test_side_by_side_every_row_takes_the_room_of_the_longest(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=8, **budget_of(loaded, 3, 200))
    rig.admit(request("short", prompt_of(5), max_tokens=60))
    rig.step_until("short", 2)
    rig.admit(
        request("long", prompt_of(400, 1), max_tokens=40),
        request("behind", prompt_of(5, 2), max_tokens=2),
    )
    rig.step_until("short", 60)
    assert "long" not in rig.ids, "two rows of 440 are more than three of 200"
    assert "behind" not in rig.ids, "rows behind would keep it out for ever"
    rig.finish()
    assert rig.ids["long"] == greedy_reference(loaded, prompt_of(400, 1), 40)


def test_a_single_row_runs_whatever_it_costs(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=8, kv_cost=measure(loaded.network), budget_bytes=1)
    rig.admit(*(request(str(n), prompt_of(20, n), max_tokens=4) for n in range(3)))
    assert rig.finish()["2"] == greedy_reference(loaded, prompt_of(20, 2), 4)
    assert list(rig.ends) == ["0", "1", "2"]


def test_parked_rows_of_less_priority_give_up_their_memory(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=1, **budget_of(loaded, 1, 500))
    rig.admit(request("low", prompt_of(40), max_tokens=40, priority=LOW))
    rig.step_until("low", 3)
    rig.admit(request("normal", prompt_of(30, 1), max_tokens=8, priority=NORMAL))
    rig.step_until("normal", 2)
    assert rig.finishes() == {}, "there is room to park it"
    rig.admit(request("high", prompt_of(460, 2), max_tokens=40, priority=HIGH))
    rig.finish()
    assert rig.finishes() == {"low": "preempted", "normal": "preempted", "high": "length"}
    assert rig.ids["high"] == greedy_reference(loaded, prompt_of(460, 2), 40)


def test_a_parked_row_does_not_hold_the_memory_of_its_batch(tmp_path: Path) -> None:
    """Mechanism: the lazy copy of a row keeps the arrays of all rows alive."""
    rig, before = settled_rig(tmp_path)
    row_bytes = 2 * 2 * 64 * 4 * 256  # layers x (keys, values) x width x float32 x positions
    for n in range(8):
        rig.admit(request(str(n), prompt_of(150, n), max_tokens=360, priority=LOW))
    rig.step_until("7")
    rig.admit(request("high", prompt_of(3), max_tokens=60, priority=HIGH))
    rig.step_until("high", 2)
    for name in (*"0123456", "high"):
        rig.cancel(name)
    mx.synchronize()
    assert mx.get_active_memory() - before < 1.5 * row_bytes, "the parked row alone is left"
    assert len(rig.finish()["7"]) == 360
