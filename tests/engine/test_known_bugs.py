"""Ways in which other engines for continuous batching have failed, each named by its mechanism.

Wired memory, ownership of streams and an engine that dies unseen are in test_engine.py and
test_thread.py; prefixes that leak from one row into another in test_prefix_cache.py; padding that
leaks into a recurrent state, and positions that a row leaves on a multimodal model, in the matrix
of architectures; stop strings in tests/text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from mlxq.worker.engine import caches
from mlxq.worker.engine.decode import DecodeBatch
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.prefill import Prefill
from mlxq.worker.engine.request import Admit, SamplingParams
from mlxq.worker.engine.row import Row
from tests.engine.rig import GREEDY, Rig, Trap, greedy_reference, prompt_of, request, run
from tests.engine.tiny import make_tiny_model

POISON = 299
NEVER_POISON = SamplingParams(temperature=0.0, logit_bias={POISON: -100.0})


def ready_rows(loaded: LoadedModel, count: int, length: int) -> DecodeBatch:
    """Rows that decode, read side by side."""
    batch = DecodeBatch(loaded.network)
    rows = [Row(request(str(n), prompt_of(length, n), max_tokens=40)) for n in range(count)]
    ready = Prefill(loaded.network, rows).read(length).ready
    assert ready is not None
    batch.join(ready)
    return batch


def test_pinned_buffers(tmp_path: Path) -> None:
    """A row taken out of a batch is a lazy slice: kept unevaluated, it holds the whole batch."""
    wide = load_model(str(make_tiny_model(tmp_path, hidden_size=128)))
    batch = ready_rows(wide, 8, 200)
    for _ in range(3):
        batch.step()
    mx.synchronize()
    held = mx.get_active_memory()
    whole = batch.kv_bytes
    ((cache, length),) = batch.extract([batch.rows[3]])
    assert length == 202  # all but the newest id
    batch.leave(batch.rows)
    mx.synchronize()
    assert caches.kv_bytes(cache) < whole // 7
    assert mx.get_active_memory() < held - whole + whole // 4


def test_pinned_buffers_of_rows_that_left(tmp_path: Path) -> None:
    """What a departed row was drawn from must not live on in the graph of those that stay."""
    wide = load_model(str(make_tiny_model(tmp_path, hidden_size=128)))
    batch = ready_rows(wide, 8, 200)
    batch.step()
    batch.leave(batch.rows[1:])
    batch.step()
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(20):
        batch.step()
    mx.synchronize()
    assert mx.get_active_memory() <= before + 4096


@pytest.mark.parametrize(
    "bad",
    [
        request("bad", []),
        request("bad", [4], max_tokens=10**6),
        request("bad", [-7, 5]),
        request("bad", [5, POISON, 6], sampling=NEVER_POISON),
        request("bad", [*prompt_of(60), POISON, 4], sampling=NEVER_POISON),
    ],
    ids=["empty", "beyond the context", "no id", "raises", "raises at the end"],
)
def test_one_bad_request_fails_everyone(loaded: LoadedModel, bad: Admit) -> None:
    """What raises in a step that rows share is thrown at all of them."""
    good = [
        request(str(n), prompt_of(5 + n, n), sampling=NEVER_POISON, max_tokens=20) for n in range(4)
    ]
    expected = run(loaded, *good)
    rig = Rig(replace(loaded, network=cast(Any, Trap(loaded.network, POISON))))
    rig.admit(*good[:2])
    rig.step_until("1", 2)
    rig.admit(bad, *good[2:])
    rig.finish()
    assert rig.finishes() == dict.fromkeys("0123", "length") | {"bad": "error"}
    assert {name: rig.ids[name] for name in expected} == expected


def test_poison_does_not_end_the_engine(loaded: LoadedModel) -> None:
    """The thread that generates dies of a job, and everything after it waits for ever."""
    rig = Rig(replace(loaded, network=cast(Any, Trap(loaded.network, POISON))))
    for attempt in range(3):
        rig.admit(request(f"bad {attempt}", [5, POISON, 6], sampling=NEVER_POISON))
        rig.admit(request(f"good {attempt}", prompt_of(4), sampling=NEVER_POISON))
        rig.finish()
        assert rig.ends[f"bad {attempt}"].finish == "error"
        assert rig.ends[f"good {attempt}"].finish == "length"


def test_silent_token_loss_after_another_rows_prefill_error(loaded: LoadedModel) -> None:
    """A step decodes, then reads a prompt; if that raises, the ids it had drawn are dropped."""
    rig = Rig(replace(loaded, network=cast(Any, Trap(loaded.network, POISON))))
    row = request("row", prompt_of(5), max_tokens=60, sampling=NEVER_POISON)
    expected = run(loaded, row)["row"]
    rig.admit(row)
    rig.step_until("row", 2)
    for attempt in range(12):
        before = len(rig.ids["row"])
        rig.admit(request(f"bad {attempt}", [5, POISON, 6], sampling=NEVER_POISON))
        rig.step()
        assert len(rig.ids["row"]) == before + 1
    assert rig.finish()["row"] == expected


STAGES: dict[str, Callable[[Rig], None]] = {
    "waiting": lambda rig: None,
    "prefill under way": lambda rig: rig.step(2),
    "first id in flight": lambda rig: rig.step(6),
    "decoding": lambda rig: rig.step_until("row", 3),
    "last id in flight": lambda rig: rig.step_until("row", 7),
    "ended": lambda rig: rig.step_until("row", 8),
}


@pytest.mark.parametrize("company", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_abort_leaks(loaded: LoadedModel, stage: str, company: bool) -> None:
    """An abort that misses a row in some stage leaves a ghost, which holds its slot for ever."""
    rig = Rig(loaded, max_batch=4)
    others = [request(str(n), prompt_of(7, n), max_tokens=30) for n in range(2 * company)]
    rig.admit(*others, request("row", prompt_of(70, 9), max_tokens=8))
    STAGES[stage](rig)
    rig.cancel("row")
    rig.cancel("row")
    made = list(rig.ids.get("row", []))
    rig.finish()
    assert rig.ids.get("row", []) == made
    assert rig.finishes() == dict.fromkeys((each.key.job_id for each in others), "length") | (
        {"row": "length"} if stage == "ended" else {}
    )
    assert not rig.batch.busy and rig.batch.kv_bytes == 0
    rig.admit(*(request(f"new {n}", prompt_of(5, n), max_tokens=90) for n in range(4)))
    rig.step(20)
    assert all(f"new {n}" in rig.ids for n in range(4)), "all slots are free"


def test_abort_of_a_row_read_beside_others(loaded: LoadedModel) -> None:
    for step in range(4):
        rig = Rig(loaded, prefill_step=64)
        rig.admit(*(request(str(n), prompt_of(9, n), max_tokens=6) for n in range(4)))
        rig.step(step)
        rig.cancel("1")
        rig.finish()
        assert set(rig.ends) == {"0", "2", "3"}
        assert not rig.batch.busy and rig.batch.kv_bytes == 0
        for n in (0, 2, 3):
            assert rig.ids[str(n)] == greedy_reference(loaded, prompt_of(9, n), 6)


@pytest.mark.parametrize("window", [8, 16])
def test_rotating_caches_that_wrapped(tmp_path: Path, window: int) -> None:
    """Rows on both sides of the window's end are merged, parted and extended in a wrong order."""
    config = {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": window,
        "sliding_window_pattern": 2,
    }
    loaded = load_model(str(make_tiny_model(tmp_path, config=config)))
    rig = Rig(loaded, max_batch=4)
    lengths = (30, 3, window - 1, window, window + 1, 5)
    for index, length in enumerate(lengths):
        rig.admit(request(str(index), prompt_of(length, index), max_tokens=10 + 7 * index))
        rig.step(6)
    rig.finish()
    for index, length in enumerate(lengths):
        expected = greedy_reference(loaded, prompt_of(length, index), 10 + 7 * index)
        assert rig.ids[str(index)] == expected, f"row {index}"


def test_mixed_samplers(loaded: LoadedModel) -> None:
    """The first request's sampler serves all, or seeds are of places in the batch, not of rows."""
    hot = [SamplingParams(temperature=1.5, seed=seed) for seed in (1, 2, 2)]
    ids = run(
        loaded,
        request("hot 1", prompt_of(6), sampling=hot[0]),
        request("greedy", prompt_of(6)),
        request("hot 2", prompt_of(6), sampling=hot[1]),
        request("hot 2 again", prompt_of(6), sampling=hot[2]),
    )
    assert ids["greedy"] == greedy_reference(loaded, prompt_of(6), 16)
    assert ids["hot 1"] != ids["hot 2"] == ids["hot 2 again"]
    assert run(loaded, request("row", prompt_of(6), sampling=hot[1]))["row"] == ids["hot 2"]


CONSTRAINED = SamplingParams(temperature=0.0, logit_bias={7: 100.0, 8: 99.5}, frequency_penalty=2.0)


@pytest.mark.parametrize("order", list(itertools.permutations((3, 8, 13))))
def test_processor_slots_misaligned(loaded: LoadedModel, order: tuple[int, int, int]) -> None:
    """After a row joins or leaves, the bias and penalties of one row act on another."""
    kinds = (CONSTRAINED, GREEDY, CONSTRAINED)
    rig = Rig(loaded, max_batch=3)
    for index, (sampling, count) in enumerate(zip(kinds, order, strict=True)):
        name = f"{index}"
        rig.admit(request(name, prompt_of(4, index), max_tokens=count, sampling=sampling))
        rig.step(2)
    rig.admit(request("late", prompt_of(5, 5), max_tokens=9, sampling=CONSTRAINED))
    rig.admit(request("plain", prompt_of(5, 6), max_tokens=9))
    rig.finish()
    assert rig.ids["1"] == greedy_reference(loaded, prompt_of(4, 1), order[1])
    assert rig.ids["plain"] == greedy_reference(loaded, prompt_of(5, 6), 9)
    for name, prompt, count in (
        ("0", prompt_of(4, 0), order[0]),
        ("2", prompt_of(4, 2), order[2]),
        ("late", prompt_of(5, 5), 9),
    ):
        row = request(name, prompt, max_tokens=count, sampling=CONSTRAINED)
        assert rig.ids[name] == run(loaded, row)[name]
        assert set(rig.ids[name]) <= {7, 8}


def test_a_short_job_starves_behind_a_long_prefill(loaded: LoadedModel) -> None:
    """Prompts are read one after the other: a short one waits for all chunks of a long one."""
    rig = Rig(loaded, prefill_step=8)
    rig.admit(request("long", prompt_of(320)))
    rig.step(3)
    rig.admit(request("short", prompt_of(6, 1)))
    before = rig.steps
    rig.step_until("short")
    assert rig.steps - before <= 4
    assert "long" not in rig.ids


def test_free_slots_stay_empty_while_rows_wait(loaded: LoadedModel) -> None:
    """New rows are taken in only when several slots are free, or when nothing prefills."""
    rig = Rig(loaded, max_batch=16)
    rig.admit(*(request(f"first {n}", prompt_of(4, n), max_tokens=50) for n in range(9)))
    rig.step_until("first 8")
    rig.admit(*(request(f"late {n}", prompt_of(4, 20 + n), max_tokens=5) for n in range(7)))
    rig.step(9)
    assert sum(name.startswith("late") for name in rig.ids) == 7


def test_long_prompts_starve_under_a_stream_of_short_ones(loaded: LoadedModel) -> None:
    """The queue is sorted by length on every insertion: a longer prompt never has its turn."""
    rig = Rig(loaded, max_batch=3)
    rig.admit(request("long", prompt_of(64), max_tokens=1))
    for number in range(40):
        rig.admit(request(str(number), prompt_of(4, number), max_tokens=1))
        rig.step()
        if "long" in rig.ends:
            break
    assert rig.ids["long"] == greedy_reference(loaded, prompt_of(64), 1)
