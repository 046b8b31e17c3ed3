"""The batch: every row gets what it would get alone, whatever happens around it."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.request import Admit, SamplingParams
from tests.engine.rig import (
    GREEDY,
    Rig,
    Trap,
    greedy_reference,
    prompt_of,
    reference_logprobs,
    request,
    run,
    settled_rig,
)
from tests.engine.tiny import make_tiny_model

LENGTHS = (3, 17, 40, 1, 2, 25, 90, 16)
POISON = 299


@pytest.mark.parametrize("prefill_step", [1, 7, 16, 512])
def test_rows_that_arrive_in_turn_equal_single_requests(
    loaded: LoadedModel, prefill_step: int
) -> None:
    rig = Rig(loaded, max_batch=5, prefill_step=prefill_step)
    for index, length in enumerate(LENGTHS):
        rig.admit(request(str(index), prompt_of(length, index), max_tokens=10 + index))
        rig.step(index % 3)
    rig.finish()
    for index, length in enumerate(LENGTHS):
        expected = greedy_reference(loaded, prompt_of(length, index), 10 + index)
        assert rig.ids[str(index)] == expected, f"row {index}"
    assert set(rig.finishes().values()) == {"length"}


@pytest.mark.parametrize(
    ("config", "side_by_side"),
    [
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, True),
        (
            {
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": 16,
                "sliding_window_pattern": 2,
            },
            True,
        ),
        ({"model_type": "falcon_h1"}, False),
    ],
    ids=["sliding window", "gemma3", "hybrid"],
)
def test_other_architectures(tmp_path: Path, config: dict[str, Any], side_by_side: bool) -> None:
    other = load_model(str(make_tiny_model(tmp_path, config=config)))
    assert other.network.padding_is_exact is side_by_side
    rig = Rig(other, max_batch=5)
    for index, length in enumerate(LENGTHS):
        rig.admit(request(str(index), prompt_of(length, index), max_tokens=20 + index))
        rig.step(index % 3)
    rig.finish()
    for index, length in enumerate(LENGTHS):
        expected = greedy_reference(other, prompt_of(length, index), 20 + index)
        assert rig.ids[str(index)] == expected, f"row {index}"


def test_greedy_rows_beside_sampled_ones_are_exact(loaded: LoadedModel) -> None:
    hot = SamplingParams(temperature=1.5, frequency_penalty=0.5)
    requests = [
        request(str(index), prompt_of(5 + index, index), sampling=hot if index % 2 else GREEDY)
        for index in range(6)
    ]
    ids = run(loaded, *requests)
    for index in range(0, 6, 2):
        assert ids[str(index)] == greedy_reference(loaded, prompt_of(5 + index, index), 16)


def test_logprobs_come_with_their_ids(loaded: LoadedModel) -> None:
    """One per id that is put out, for the rows that ask, whoever joins or leaves meanwhile."""
    rig = Rig(loaded, max_batch=4)
    asking = {0: 3, 2: 0, 5: 1}
    expected = greedy_reference(loaded, prompt_of(7, 2), 12)
    for index in range(6):
        sampling = replace(GREEDY, logprobs=asking.get(index))
        stop = frozenset({expected[-1]}) if index == 2 else frozenset[int]()
        count = 40 if index == 2 else 5 + 3 * index
        rig.admit(
            request(
                str(index),
                prompt_of(5 + index, index),
                max_tokens=count,
                sampling=sampling,
                stop_ids=stop,
            )
        )
        rig.step(2)
    rig.finish()
    assert rig.finishes()["2"] == "stop"
    for index in range(6):
        ids, reports = rig.ids[str(index)], rig.logprobs[str(index)]
        if index not in asking:
            assert not reports
            continue
        prompt = prompt_of(5 + index, index)
        wanted = reference_logprobs(loaded, prompt, ids)
        assert [report.logprob for report in reports] == pytest.approx(wanted, abs=1e-4)
        for id, report in zip(ids, reports, strict=True):
            assert len(report.top) == asking[index]
            assert not report.top or report.top[0] == (id, report.logprob)


def test_every_row_is_told_once_what_it_need_not_read(loaded: LoadedModel) -> None:
    """`cached` comes when the prefill begins, before the first id, also where nothing is kept."""
    rig = Rig(loaded, max_batch=2)
    rig.admit(*(request(str(n), prompt_of(20, n), max_tokens=3) for n in range(4)))
    rig.step(1)
    assert rig.cached == {"0": 0}
    rig.finish()
    assert rig.cached == dict.fromkeys("0123", 0)


def test_many_rows_that_leave_and_join_are_exact(loaded: LoadedModel) -> None:
    """In a large batch rows that left stay in the arrays for a while."""
    rig = Rig(loaded, max_batch=40, prefill_step=256)
    counts = {n: 3 + (7 * n) % 50 for n in range(70)}
    sampling = replace(GREEDY, logprobs=1)
    for n, count in counts.items():
        each = sampling if n % 5 == 0 else GREEDY
        rig.admit(request(str(n), prompt_of(4 + n % 9, n), max_tokens=count, sampling=each))
        rig.step(n % 2)
        if n % 10 == 9:
            rig.cancel(str(n - 4))
    rig.finish()
    assert rig.batch.kv_bytes == 0
    for n, count in counts.items():
        expected = greedy_reference(loaded, prompt_of(4 + n % 9, n), count)
        made = rig.ids.get(str(n), [])
        assert made == (expected if str(n) in rig.ends else expected[: len(made)])
        if n % 5 == 0:
            assert [report.top[0][0] for report in rig.logprobs.get(str(n), [])] == made


def test_no_more_rows_than_slots(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=2)
    rig.admit(*(request(str(index), prompt_of(4, index), max_tokens=8) for index in range(5)))
    while rig.batch.busy:
        before = {name: len(ids) for name, ids in rig.ids.items()}
        rig.step()
        grown = [name for name, ids in rig.ids.items() if len(ids) > before.get(name, 0)]
        assert len(grown) <= 2
    assert len(rig.ends) == 5


def test_one_id_per_decoding_row_and_step(loaded: LoadedModel) -> None:
    rig = Rig(loaded)
    rig.admit(request("first", prompt_of(4), max_tokens=30))
    rig.step_until("first")
    rig.admit(request("long", prompt_of(100, 1), max_tokens=4))
    for count in range(2, 12):
        rig.step()
        assert len(rig.ids["first"]) == count


def test_short_row_passes_a_long_prefill(loaded: LoadedModel) -> None:
    rig = Rig(loaded)
    rig.admit(request("long", prompt_of(400)), request("short", prompt_of(4, 1)))
    rig.step(4)
    assert len(rig.ids["short"]) >= 1
    assert "long" not in rig.ids


def test_long_rows_go_on_under_a_stream_of_short_ones(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=3)
    rig.admit(request("long", prompt_of(160), max_tokens=1))
    for index in range(60):
        rig.admit(request(str(index), prompt_of(4, index), max_tokens=1))
    while "long" not in rig.ends:
        rig.step()
    # Of each short one between two chunks: its prompt, its decode step, the read of that.
    assert rig.steps <= 4 * (160 // 16) + 3
    assert rig.ids["long"] == greedy_reference(loaded, prompt_of(160), 1)


def test_two_long_rows_take_turns(loaded: LoadedModel) -> None:
    rig = Rig(loaded)
    rig.admit(request("longer", prompt_of(400)), request("long", prompt_of(48, 1)))
    rig.step_until("long")
    assert "longer" not in rig.ids


def test_cancel_in_every_stage(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=3)
    rig.admit(
        request("decoding", prompt_of(5), max_tokens=200),
        request("stays", prompt_of(6, 1), max_tokens=20),
        request("prefilling", prompt_of(300, 2)),
        request("waiting", prompt_of(7, 3)),
        request("next", prompt_of(8, 4), max_tokens=12),
    )
    rig.step_until("decoding", 3)
    assert "prefilling" not in rig.ids and "waiting" not in rig.ids
    rig.cancel("waiting")
    rig.step()
    rig.cancel("prefilling")
    rig.step()
    rig.cancel("decoding")
    produced = len(rig.ids["decoding"])
    rig.finish()
    assert len(rig.ids["decoding"]) == produced
    assert rig.ids["decoding"] == greedy_reference(loaded, prompt_of(5), produced)
    assert rig.finishes() == {"stays": "length", "next": "length"}
    assert rig.ids["stays"] == greedy_reference(loaded, prompt_of(6, 1), 20)
    assert rig.ids["next"] == greedy_reference(loaded, prompt_of(8, 4), 12)
    assert rig.ids.keys() == {"decoding", "stays", "next"}


def test_a_waiting_row_takes_the_slot_of_a_cancelled_one(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_batch=1)
    rig.admit(request("first", prompt_of(4), max_tokens=200), request("second", prompt_of(4, 1)))
    rig.step_until("first", 5)
    assert "second" not in rig.ids
    rig.cancel("first")
    rig.step(3)  # its prompt but for the last id, that and the draw, the read
    assert len(rig.ids["second"]) == 1


def test_cancel_of_unknown_finished_and_cancelled_rows(loaded: LoadedModel) -> None:
    rig = Rig(loaded)
    rig.cancel("never")
    rig.admit(request("row", prompt_of(4), max_tokens=3), request("beside", prompt_of(5, 1)))
    rig.step_until("row", 3)
    rig.cancel("row")
    rig.admit(request("gone", prompt_of(5)))
    rig.cancel("gone")
    rig.cancel("gone")
    rig.finish()
    assert rig.finishes() == {"row": "length", "beside": "length"}
    assert not rig.batch.busy


def test_cancel_of_the_whole_batch_then_a_new_row(loaded: LoadedModel) -> None:
    rig = Rig(loaded)
    rig.admit(*(request(str(index), prompt_of(4, index)) for index in range(3)))
    rig.step(4)
    for index in range(3):
        rig.cancel(str(index))
    assert not rig.batch.busy
    rig.admit(request("new", prompt_of(9)))
    assert rig.finish()["new"] == greedy_reference(loaded, prompt_of(9), 16)


def test_stop_id_ends_the_row_and_is_not_put_out(loaded: LoadedModel) -> None:
    expected = greedy_reference(loaded, prompt_of(6), 16)
    for position in (0, 1, 7, 15):
        stop = frozenset({expected[position], 298})
        first = expected.index(expected[position])
        rig = Rig(loaded)
        rig.admit(request("row", prompt_of(6), stop_ids=stop), request("beside", prompt_of(6, 1)))
        ids = rig.finish()
        assert ids["row"] == expected[:first]
        assert rig.finishes() == {"row": "stop", "beside": "length"}
        assert ids["beside"] == greedy_reference(loaded, prompt_of(6, 1), 16)


def test_stop_id_in_the_prompt_or_the_generated_part_does_not_count(loaded: LoadedModel) -> None:
    expected = greedy_reference(loaded, prompt_of(6), 16)
    stop = frozenset(prompt_of(6)) - set(expected)
    assert stop
    assert run(loaded, request("row", prompt_of(6), stop_ids=stop))["row"] == expected


def test_max_tokens_counts_over_all_attempts(loaded: LoadedModel) -> None:
    expected = greedy_reference(loaded, prompt_of(6), 5)
    rig = Rig(loaded)
    rig.admit(
        request("one", prompt_of(6), max_tokens=1),
        request("last", prompt_of(6), generated=expected[:4], max_tokens=5),
        request("complete", prompt_of(6), generated=expected, max_tokens=5),
        request("beyond", prompt_of(6), generated=expected, max_tokens=3),
    )
    rig.finish()
    assert rig.ids == {"one": expected[:1], "last": expected[4:], "complete": [], "beyond": []}
    assert set(rig.finishes().values()) == {"length"}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("bad", []), "prompt is empty"),
        (request("bad", [4, 300]), "vocabulary of 300"),
        (request("bad", [4, -1]), "vocabulary of 300"),
        (request("bad", [4], generated=[300]), "vocabulary of 300"),
        (request("bad", prompt_of(500), max_tokens=13), "context of 512"),
    ],
)
def test_a_row_that_cannot_run_fails_alone(loaded: LoadedModel, bad: Admit, words: str) -> None:
    rig = Rig(loaded)
    rig.admit(request("good", prompt_of(5)), bad, request("after", prompt_of(5, 1)))
    rig.finish()
    assert rig.finishes() == {"good": "length", "bad": "error", "after": "length"}
    assert words in rig.ends["bad"].error
    assert rig.ids["bad"] == []
    assert rig.ids["good"] == greedy_reference(loaded, prompt_of(5), 16)


def test_a_row_that_fills_the_context(loaded: LoadedModel) -> None:
    ids = run(loaded, request("row", prompt_of(500), max_tokens=12))["row"]
    assert ids == greedy_reference(loaded, prompt_of(500), 12)


NEVER_POISON = SamplingParams(temperature=0.0, logit_bias={POISON: -100.0})
"""The greedy output of a row must not itself hold the poison."""


def trapped(loaded: LoadedModel) -> tuple[LoadedModel, Trap]:
    trap = Trap(loaded.network, POISON)
    return replace(loaded, network=cast(Any, trap)), trap


@pytest.mark.parametrize("position", [0, 3, 20, 46])
def test_a_prefill_that_raises_costs_no_other_row_a_token(
    loaded: LoadedModel, position: int
) -> None:
    expected = {
        name: run(loaded, request(name, prompt_of(5, salt), sampling=NEVER_POISON))[name]
        for salt, name in enumerate(("one", "two"))
    }
    poisoned = prompt_of(48, 9)
    poisoned[position] = POISON
    trap_model, _ = trapped(loaded)
    rig = Rig(trap_model)
    rig.admit(
        request("one", prompt_of(5, 0), sampling=NEVER_POISON),
        request("two", prompt_of(5, 1), sampling=NEVER_POISON),
    )
    rig.step_until("two", 2)
    rig.admit(request("bad", poisoned, sampling=NEVER_POISON))
    while "bad" not in rig.ends:
        before = len(rig.ids["two"])
        rig.step()
        assert len(rig.ids["two"]) == before + 1, "a decode step was lost"
    rig.finish()
    assert rig.finishes() == {"one": "length", "two": "length", "bad": "error"}
    assert rig.ends["bad"].error == "RuntimeError: poisoned"
    assert {name: rig.ids[name] for name in expected} == expected


def test_rows_prefilled_beside_a_bad_one_start_again(loaded: LoadedModel) -> None:
    seeded = SamplingParams(seed=5, logit_bias={POISON: -100.0})
    good = [request(str(index), prompt_of(3, index), sampling=seeded) for index in range(3)]
    expected = run(loaded, *good)
    trap_model, _ = trapped(loaded)
    rig = Rig(trap_model)
    rig.admit(*good[:2], request("bad", [4, POISON, 5]), good[2])
    rig.finish()
    assert rig.finishes() == {"0": "length", "1": "length", "2": "length", "bad": "error"}
    assert {name: rig.ids[name] for name in expected} == expected


def test_a_broken_engine_fails_no_job_but_raises(loaded: LoadedModel) -> None:
    trap_model, trap = trapped(loaded)
    rig = Rig(trap_model)
    trap.broken = True
    rig.admit(request("row", prompt_of(5)))
    with pytest.raises(RuntimeError, match="poisoned"):
        rig.finish()
    assert not rig.ends


def test_a_decode_step_that_raises_is_not_swallowed(loaded: LoadedModel) -> None:
    trap_model, trap = trapped(loaded)
    rig = Rig(trap_model)
    rig.admit(request("row", prompt_of(5), sampling=NEVER_POISON))
    rig.step_until("row", 3)
    trap.broken = True
    with pytest.raises(RuntimeError, match="poisoned"):
        rig.step()


def test_finished_and_cancelled_rows_leave_no_memory(tmp_path: Path) -> None:
    rig, before = settled_rig(tmp_path)
    row_bytes = 2 * 2 * 64 * 4 * 400  # layers x (keys, values) x width x float32 x positions
    rig.admit(*(request(str(n), prompt_of(380, n), max_tokens=90 + n) for n in range(8)))
    for n in range(8):
        rig.step_until(str(n))
    assert mx.get_active_memory() - before > 7 * row_bytes
    rig.cancel("3")
    while len(rig.ends) < 7:
        rig.step()
    rig.step()
    assert mx.get_active_memory() - before < 2 * row_bytes
    rig.finish()
    gc.collect()
    assert mx.get_active_memory() - before < row_bytes // 10
