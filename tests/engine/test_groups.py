"""Long and short rows decode in batches of their own where padding would cost more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxq.worker.engine.groups import DecodeGroups
from mlxq.worker.engine.memory import measure, model_bytes
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.probe import pass_bytes
from mlxq.worker.engine.row_cache import CacheOptions
from tests.engine.rig import Rig, greedy_reference, prompt_of, request
from tests.engine.tiny import make_tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "sliding window": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hybrid": {"model_type": "falcon_h1"},
}
LONG, SHORT, ROWS = 400, 5, 12


class Counting:
    """A network that counts its decode steps by their number of rows."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.steps: list[int] = []

    def __call__(self, ids: Any, cache: Any) -> Any:
        if ids.shape[1] == 1:
            self.steps.append(ids.shape[0])
        return self._network(ids, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def groups(most_padding: int) -> DecodeGroups:
    return DecodeGroups(None, CacheOptions(), token_bytes=1, pass_bytes=most_padding)


@pytest.mark.parametrize(
    ("lengths", "most_padding", "parts"),
    [
        ([], 100, []),
        ([7], 0, [(1, 7)]),
        ([7, 7, 7], 0, [(3, 7)]),
        ([7, 8, 7], 1, [(2, 8), (1, 7)]),
        ([7, 8, 7], 2, [(3, 8)]),
        ([10, 1000, 20, 990], 100, [(2, 1000), (2, 20)]),
        ([100] * 3 + [50] * 3, 100, [(5, 100), (1, 50)]),
    ],
)
def test_rows_part_where_padding_takes_longer_than_a_pass(
    lengths: list[int], most_padding: int, parts: list[tuple[int, int]]
) -> None:
    assert groups(most_padding).padded(lengths) == parts


def test_rows_never_part_where_positions_cost_nothing() -> None:
    free = DecodeGroups(None, CacheOptions(), token_bytes=0, pass_bytes=10)
    assert free.padded([1, 10_000]) == [(2, 10_000)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["long", "short"])
def test_rows_in_batches_of_their_own_are_exact(tmp_path: Path, kind: str, first: str) -> None:
    loaded = load_model(str(make_tiny_model(tmp_path, config=KINDS[kind])))
    network = Counting(loaded.network)
    loaded = LoadedModel(network, loaded.info)  # type: ignore[arg-type]
    rig = Rig(loaded, max_batch=ROWS + 2, prefill_step=256, kv_cost=measure(loaded.network))
    requests = {
        "long": [request(f"long {n}", prompt_of(LONG + n, n), max_tokens=30) for n in range(2)],
        "short": [request(f"{n}", prompt_of(SHORT + n, n), max_tokens=20) for n in range(ROWS)],
    }
    second = {"long": "short", "short": "long"}[first]
    rig.admit(*requests[first])
    rig.step_until(requests[first][-1].key.job_id, 2)
    rig.admit(*requests[second])
    rig.finish()
    for each in (*requests["long"], *requests["short"]):
        expected = greedy_reference(loaded, each.prompt, each.max_tokens)
        assert rig.ids[each.key.job_id] == expected, each.key.job_id
    padding = LONG * ROWS * measure(loaded.network).bytes_per_token
    assert padding > model_bytes(loaded.network)
    assert max(network.steps) < ROWS + 2


def test_alike_batches_unite(loaded: LoadedModel) -> None:
    """The long row has gone that kept the two others apart from the rest."""
    network = Counting(loaded.network)
    cost = measure(loaded.network)
    positions = model_bytes(loaded.network) // cost.bytes_per_token
    short = min(10, 1 + positions // 400)
    rig = Rig(
        LoadedModel(network, loaded.info),  # type: ignore[arg-type]
        max_batch=40,
        prefill_step=256,
        kv_cost=cost,
    )
    rig.admit(request("long", prompt_of(440), max_tokens=12))
    rig.step_until("long")
    rig.admit(*(request(str(n), prompt_of(5, n), max_tokens=60) for n in range(2 * short)))
    rig.step_until(str(2 * short - 1), 4)
    assert max(network.steps) < 2 * short + 1
    while "long" not in rig.ends:
        rig.step()
    rig.admit(request("last", prompt_of(6, 77), max_tokens=9))
    rig.finish()
    assert max(network.steps) == 2 * short + 1
    for n in range(2 * short):
        assert rig.ids[str(n)] == greedy_reference(loaded, prompt_of(5, n), 60)


@pytest.mark.parametrize(("budget_in_weights", "is_together"), [(80, True), (8, False)])
def test_rows_stay_together_where_a_pass_takes_long(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    budget_in_weights: int,
    is_together: bool,
) -> None:
    """The host is slow: meanwhile ten times the weights are read. But memory is not for padding."""
    weights = model_bytes(loaded.network)
    monkeypatch.setattr("mlxq.worker.engine.batch.pass_bytes", lambda *_: 10 * weights)
    network, cost = Counting(loaded.network), measure(loaded.network)
    rig = Rig(
        LoadedModel(network, loaded.info),  # type: ignore[arg-type]
        max_batch=ROWS + 2,
        prefill_step=256,
        kv_cost=cost,
        budget_bytes=budget_in_weights * weights,
    )
    rig.batch.warm_up()
    network.steps.clear()
    rows = 1 + 2 * weights // (400 * cost.bytes_per_token)
    assert rows < ROWS
    rig.admit(request("long", prompt_of(440), max_tokens=12))
    rig.step_until("long")
    rig.admit(*(request(str(n), prompt_of(5, n), max_tokens=12) for n in range(rows)))
    rig.finish()
    assert (max(network.steps) == rows + 1) is is_together


def test_a_cpu_is_not_bound_by_memory(loaded: LoadedModel) -> None:
    assert pass_bytes(loaded.network, CacheOptions()) == 0
