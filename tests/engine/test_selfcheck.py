"""The self-check at start finds what would make rows wrong, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import structlog

from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.request import Logprob
from mlxq.worker.engine.row_cache import CacheOptions
from mlxq.worker.engine.selfcheck import _compared, _Drawn, self_check
from mlxq.worker.engine.thread import EngineThread
from tests.engine.architectures import config_of
from tests.engine.tiny import write_network

GUARD_S = 60.0


class Bent:
    """A network whose logits are larger where `bends` says so of the ids it is given."""

    def __init__(self, network: Any, bends: Any) -> None:
        self._network = network
        self._bends = bends
        self.padding_is_exact = network.padding_is_exact

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._network(ids, cache=cache)
        return logits * 1.2 if self._bends(ids) else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def checked(loaded: LoadedModel, bends: Any) -> tuple[LoadedModel, list[str]]:
    """What the check makes of a bent network, and the events it logs."""
    network: Any = Bent(loaded.network, bends)
    with structlog.testing.capture_logs() as logs:
        found = self_check(replace(loaded, network=network), CacheOptions())
    return found, [log["event"] for log in logs]


def test_a_sound_model_stays_as_it_is(loaded: LoadedModel) -> None:
    found, events = checked(loaded, lambda ids: False)
    assert found.info == loaded.info and found.network.padding_is_exact
    assert events == []


def test_a_model_that_is_wrong_in_a_batch_runs_at_one_row(loaded: LoadedModel) -> None:
    found, events = checked(loaded, lambda ids: ids.shape[0] > 1)
    assert found.info.max_batch == 1
    assert events == ["prefill_side_by_side_off", "inexact_in_a_batch"]


def test_a_model_that_raises_in_a_batch_runs_at_one_row(loaded: LoadedModel) -> None:
    def raises(ids: mx.array) -> bool:
        if ids.shape[0] > 1:
            raise ValueError("no batch")
        return False

    assert checked(loaded, raises)[0].info.max_batch == 1


def test_a_model_that_raises_alone_raises(loaded: LoadedModel) -> None:
    def raises(ids: mx.array) -> bool:
        raise ValueError("no row")

    with pytest.raises(ValueError, match="no row"):
        checked(loaded, raises)


@pytest.mark.parametrize(
    "model_type", ["mamba", "jamba", "nemotron_h", "qwen3_next", "falcon_h1", "bailing_moe_linear"]
)
def test_padding_that_leaks_into_a_state_is_found(tmp_path: Path, model_type: str) -> None:
    loaded = load_model(str(write_network(tmp_path, config_of(model_type))))
    assert not loaded.network.padding_is_exact, "as its layers tell"
    loaded.network.padding_is_exact = True
    found = self_check(loaded, CacheOptions())
    assert not found.network.padding_is_exact
    assert found.info.max_batch > 1, "rows that are read one by one may decode together"


def drawn(id: int, logprob: float, *others: tuple[int, float]) -> _Drawn:
    return _Drawn(id, Logprob(logprob, [(id, logprob), *others]))


def test_ids_may_part_where_two_are_as_good_as_equal() -> None:
    alone = [drawn(1, -0.5, (2, -0.50001)), drawn(3, -0.1)]
    assert _compared(alone, alone, 1e-3) == ""
    assert _compared(alone, [drawn(2, -0.5), drawn(9, -2.0)], 1e-3) == ""
    assert "id 9 where it is 1" in _compared(alone, [drawn(9, -0.5), drawn(3, -0.1)], 1e-3)
    assert "id 9 where it is 3" in _compared(alone, [drawn(1, -0.5), drawn(9, -0.1)], 1e-3)
    assert "differ by 0.05" in _compared(alone, [drawn(1, -0.5), drawn(3, -0.2)], 1e-3)


def test_a_model_without_a_batch_is_served_one_row_at_a_time(tmp_path: Path) -> None:
    folder = write_network(tmp_path, config_of("gpt_bigcode"))
    engine = EngineThread(
        lambda: load_batch(str(folder), max_batch=8), on_outputs=lambda _: None, on_dead=print
    )
    engine.start()
    assert engine.info.result(GUARD_S).max_batch == 1
    engine.stop()
    assert engine.join(GUARD_S)
