"""What rows cost and what there is for them; bounded and quantised caches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import typer
from mlx_lm.generate import BatchGenerator
from typer.testing import CliRunner

from mlxq.worker import cli, log, service
from mlxq.worker.amounts import parse_bytes, parse_share
from mlxq.worker.config import EXIT_BAD_CONFIG, Config
from mlxq.worker.engine import caches, memory, row_cache
from mlxq.worker.engine.batch import MlxBatch
from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.memory import (
    GROWTH_IDS,
    IDLE_CACHE_BYTES,
    ClearRhythm,
    KvCost,
    MemoryPlan,
    measure,
    model_bytes,
    plan_memory,
    set_limits,
)
from mlxq.worker.engine.models import ModelError, load_model
from mlxq.worker.engine.network import Network
from mlxq.worker.engine.request import Admit, RowKey, SamplingParams
from mlxq.worker.engine.row_cache import (
    CacheOptions,
    QuantisedBatch,
    QuantisedRow,
    check_quantised,
    make_row_cache,
    quantised,
)
from tests.engine.architectures import ARCHITECTURES, SHARED
from tests.engine.rig import Rig, prompt_of, request, run
from tests.engine.tiny import make_tiny_model, write_network

# One of each kind of cache: plain, grouped heads, latent, windows, recurrent, mixed, of mlx-lm.
KINDS = ["llama", "gpt_neox", "deepseek_v3", "gpt_oss", "mamba", "falcon_h1", "olmo_hybrid"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Three layers with heads wide enough to be quantised."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    config = {"head_dim": 32, "num_hidden_layers": 3}
    return load_model(str(make_tiny_model(folder, config=config))).network


@pytest.fixture(scope="module")
def tiny_wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer; heads wide enough to be quantised."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", config={"head_dim": 32})


def tiny_of(kind: str, folder: Path, **config: Any) -> Network:
    settings = SHARED | {"model_type": kind} | ARCHITECTURES[kind] | config
    return load_model(str(write_network(folder / kind, settings))).network


def read(network: Network, ids: list[int], options: CacheOptions | None = None) -> caches.Cache:
    """One row that has read ids, one after the other at the end as in a decode."""
    cache = make_row_cache(network, options or CacheOptions())
    network(mx.array([ids[:-1]]), cache)
    network(mx.array([ids[-1:]]), cache)
    mx.eval(caches.arrays(cache))
    return cache


def greedy(network: Network, rows: list[int], cache: caches.Cache, count: int) -> list[list[int]]:
    """The ids that each row goes on with, after the one given."""
    drawn = []
    ids = mx.array(rows)[:, None]
    for _ in range(count):
        ids = mx.argmax(network(ids, cache)[:, -1:], axis=-1)
        drawn.append(ids[:, 0].tolist())
    return [list(row) for row in zip(*drawn, strict=True)]


# What a row costs


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_what_a_row_holds(tmp_path: Path, kind: str) -> None:
    network = tiny_of(kind, tmp_path)
    cost = measure(network)
    for length in (5, GROWTH_IDS, GROWTH_IDS + 44):
        held = caches.kv_bytes(read(network, prompt_of(length)))
        assert held <= cost.of(length) <= held + GROWTH_IDS * cost.bytes_per_token
        assert cost.of(length) <= cost.fixed_bytes + length * cost.bytes_per_token
    one = network.make_cache()
    network(mx.array([[5]]), one)
    assert caches.kv_bytes(one) == cost.of(1)


def test_the_cost_of_windows_and_states(tmp_path: Path) -> None:
    assert measure(tiny_of("llama", tmp_path)) == KvCost(2 * 2 * 2 * 8 * 4, 0)
    # A layer of each kind; the window is 8 positions.
    assert measure(tiny_of("gpt_oss", tmp_path)) == KvCost(2 * 2 * 8 * 4, 0, ((8, 2 * 2 * 8 * 4),))
    recurrent = measure(tiny_of("mamba", tmp_path))
    assert recurrent.bytes_per_token == 0 and recurrent.of(1) == recurrent.of(10**6) > 0


def test_the_cost_of_a_batch_is_that_of_its_longest_row(wide: Network) -> None:
    rows = [read(wide, prompt_of(length)) for length in (10, 300)]
    batch = caches.merge(rows)
    wide(mx.array([[3], [4]]), batch)
    assert caches.kv_bytes(batch) <= measure(wide).of_batch(2, 301)
    assert caches.kv_bytes(batch) > measure(wide).of(301) + measure(wide).of(11)


def test_measuring_computes_nothing(wide: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("computed")

    before = mx.get_active_memory()
    monkeypatch.setattr(mx, "eval", refuse)
    monkeypatch.setattr(mx, "async_eval", refuse)
    measure(wide, CacheOptions(kv_bits=4))
    assert mx.get_active_memory() - before < 1000


# What there is


def test_the_plan_adds_up() -> None:
    plan = plan_memory(4 << 30, budget=16e9)
    assert plan.total_bytes == 16e9
    assert plan.prefix_bytes == int(1.6e9)
    assert plan.cache_limit_bytes == 1e9
    assert plan.kv_bytes == int(16e9) - (4 << 30) - int(1.6e9) - 2 * 10**9
    assert plan_memory(0, budget=200e9).cache_limit_bytes == memory.MAX_CACHE_LIMIT_BYTES
    assert plan_memory(0, budget=16e9, prefix_cache=0.5).prefix_bytes == 8e9
    assert plan_memory(0, budget=16e9, prefix_cache=3e9).prefix_bytes == 3e9
    assert plan_memory(0, budget=16e9, prefix_cache=0).prefix_bytes == 0


@pytest.mark.parametrize(
    "info",
    [
        {"max_recommended_working_set_size": 10**10, "memory_size": 10**11},
        {"total_memory": 10**10, "free_memory": 5},
    ],
    ids=["metal", "cuda"],
)
def test_a_share_is_of_what_the_device_recommends(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any]
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert plan_memory(0).total_bytes == 8_500_000_000
    assert plan_memory(0, budget=0.5).total_bytes == 5_000_000_000
    assert plan_memory(0, budget=1.0).total_bytes == 10**10


def test_without_a_device_it_is_of_the_machine() -> None:
    assert 1 << 28 < plan_memory(0).total_bytes < 1 << 50


def test_no_room_for_rows_is_told_in_one_line() -> None:
    with pytest.raises(ModelError) as refused:
        plan_memory(10 * 10**9, budget=11e9)
    assert str(refused.value) == (
        "the memory budget of 11.00 GB has no room for rows beside weights of 10.00 GB "
        "and a prefix cache of 1.10 GB: see --memory-budget"
    )


def test_the_weights_are_counted(wide: Network) -> None:
    size = model_bytes(wide)
    assert size == sum(array.nbytes for array in _leaves(wide.model.parameters()))
    assert size > 300 * 64 * 4


def _leaves(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in _leaves(part)]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("1.5 gb", 1_500_000_000),
        ("8GiB", 8 << 30),
        ("512MB", 512 * 10**6),
        ("0", 0),
        ("1000", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert parse_share(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8XB", "1,5GB", "nan", "inf", "1e3", "0.5GB5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_shares() -> None:
    assert parse_share("0.85") == 0.85
    assert parse_share("1") == 1.0
    assert parse_share("2") == 2.0
    for text in ("", "nan", "-0.5", "inf"):
        with pytest.raises(ValueError, match="is no size"):
            parse_share(text)


# From the command line to the engine


def test_flags_reach_the_engine(
    tiny_wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changes the batch that is loaded."""
    loads: list[partial[MlxBatch]] = []

    async def serve(config: Config, load: partial[MlxBatch], *_: object) -> int:
        loads.append(load)
        return 0

    monkeypatch.setattr(service, "serve", serve)
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)
    command = typer.Typer()
    command.command()(cli.worker)
    sizes = ["--memory-budget", "3GB", "--prefix-cache", "0.5"]
    sizes += ["--prefix-disk", str(tmp_path), "--prefix-disk-size", "1MB"]
    runner = CliRunner()
    for given in ([], [*sizes, "--max-kv-size", "64"], ["--kv-bits", "4"]):
        assert runner.invoke(command, [str(tiny_wide), *given]).exit_code == 0
    for given in (
        ["--max-kv-size", "64", "--kv-bits", "4"],
        ["--kv-bits", "3"],
        ["--kv-bits", "x"],
    ):
        assert runner.invoke(command, [str(tiny_wide), *given]).exit_code == EXIT_BAD_CONFIG
    limits = (mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30))
    try:
        by_default = loads[0]().info
        assert by_default.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
        assert not list(tmp_path.iterdir())
        batch = loads[1]()
        batch._prefixes.close()
        bounded = batch.info
        assert bounded.kv_bytes_per_token == 0
        assert bounded.kv_row_bytes == 64 * by_default.kv_bytes_per_token
        assert 1e9 < bounded.kv_budget_bytes < 1.2e9 < by_default.kv_budget_bytes
        assert list(tmp_path.iterdir())
        assert 0 < loads[2]().info.kv_bytes_per_token < by_default.kv_bytes_per_token / 3
    finally:
        mx.set_memory_limit(limits[0])
        mx.set_cache_limit(limits[1])


# Limits of MLX


def test_wired_memory_is_left_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 1: wired to 100 %, with buffers coming and going, Macs panicked. Default: nothing."""
    wired: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    limits = (mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30))
    try:
        batch = load_batch(str(tiny), memory_budget=4e9)
        assert (mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)) == (4e9, 4e9 / 16)
        batch.admit(
            Admit(
                RowKey("a", 1), prompt_of(40), [], 4, SamplingParams(temperature=0.0), frozenset()
            )
        )
        while batch.busy:
            batch.step()
        assert wired == []
        # What would have: the generator of the library.
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 5})
        BatchGenerator(batch._network.model).close()
        assert wired
    finally:
        mx.set_memory_limit(limits[0])
        mx.set_cache_limit(limits[1])


def test_limits_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, int] = {}
    monkeypatch.setattr(mx, "set_memory_limit", lambda size: told.update(memory=size))
    monkeypatch.setattr(mx, "set_cache_limit", lambda size: told.update(cache=size))
    set_limits(MemoryPlan(100, 10, 5, 80))
    assert told == {"memory": 100, "cache": 5}


def test_buffers_go_back_rarely_and_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cached, cleared = 0, 0

    def clear() -> None:
        nonlocal cleared
        cleared += 1

    monkeypatch.setattr(mx, "get_cache_memory", lambda: cached)
    monkeypatch.setattr(mx, "clear_cache", clear)
    rhythm = ClearRhythm(10 * IDLE_CACHE_BYTES)
    for _ in range(1000):
        rhythm.stepped(idle=False)
    assert cleared == 0, "nothing to give back"
    cached = 6 * IDLE_CACHE_BYTES
    rhythm.stepped(idle=False)
    assert cleared == 1
    for _ in range(memory.CLEAR_STEPS - 1):
        rhythm.stepped(idle=False)
    assert cleared == 1
    rhythm.stepped(idle=False)
    assert cleared == 2
    rhythm.stepped(idle=True)
    assert cleared == 3
    cached = IDLE_CACHE_BYTES
    rhythm.stepped(idle=True)
    assert cleared == 3


# Bounded caches


def test_a_bounded_row_is_that_of_a_window(wide: Network) -> None:
    """Up to the bound nothing changes; past it the row costs no more, alone and beside others."""
    options = CacheOptions(max_kv_size=32)
    cost = measure(wide, options)
    assert cost.bytes_per_token == 0 and cost.of(32) == cost.of(10**6)
    prompts = [prompt_of(20), prompt_of(60, 1)]
    rows = [read(wide, prompt, options) for prompt in prompts]
    alone = [greedy(wide, [5], read(wide, prompt, options), 10)[0] for prompt in prompts]
    assert alone[0] == greedy(wide, [5], read(wide, prompts[0]), 10)[0]
    assert alone[1] != greedy(wide, [5], read(wide, prompts[1]), 10)[0]
    batch = caches.merge(rows)
    assert greedy(wide, [5, 5], batch, 10) == alone
    assert caches.kv_bytes(batch) <= cost.of_batch(2, 10**6)


def test_windows_of_the_model_stay(tmp_path: Path) -> None:
    network = tiny_of("gpt_oss", tmp_path)
    sizes = [layer.max_size for layer in make_row_cache(network, CacheOptions(max_kv_size=64))]
    assert sorted(sizes) == [8, 64]


def test_a_model_without_plain_attention_cannot_be_bounded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no plain attention layer to bound"):
        make_row_cache(tiny_of("mamba", tmp_path), CacheOptions(max_kv_size=64))


# Quantised caches


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_layers_are_smaller_and_close(wide: Network, bits: int) -> None:
    cache = read(wide, prompt_of(100))
    small = quantised(cache, bits)
    kinds = [type(layer) for layer in small]
    assert kinds[:2] == [QuantisedRow] * 2 and kinds[2] is type(cache[2]), "the last stays"
    assert small[2] is cache[2]
    for layer, plain in zip(small[:2], cache[:2], strict=True):
        assert layer.offset == layer.size() == 100
        packed, scales, biases = layer.keys
        keys = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
        step = (plain.keys.max() - plain.keys.min()) / (2**bits - 1)
        assert float(mx.abs(keys - plain.keys[..., :100, :]).max()) <= float(step)
    assert caches.kv_bytes(small) < caches.kv_bytes(cache)
    cost = measure(wide, CacheOptions(kv_bits=bits))
    assert cost.bytes_per_token < measure(wide).bytes_per_token
    # Per number: its bits, and two floats for each group of 32.
    assert cost.bytes_per_token == 2 * (2 * 2 * 32) * (bits + 2) // 8 + 2 * 2 * 32 * 4


def test_quantised_rows_beside_each_other_are_as_alone(wide: Network) -> None:
    """They join, one leaves and is extracted, another joins: each goes on as it would alone."""
    prompts = [prompt_of(7), prompt_of(90, 1), prompt_of(30, 2)]

    def row(index: int) -> caches.Cache:
        return quantised(read(wide, prompts[index]), 8)

    alone = [greedy(wide, [5], row(index), 12)[0] for index in range(3)]
    batch = caches.merge([row(0), row(1)])
    first = greedy(wide, [5, 5], batch, 4)
    caches.extend(batch, caches.merge([row(2)]))
    second = greedy(wide, [first[0][-1], first[1][-1], 5], batch, 4)
    (parked,) = caches.extract(batch, [1])
    assert [type(layer) for layer in parked[:2]] == [QuantisedRow] * 2
    assert parked[0].size() == 98
    assert type(batch[0]) is QuantisedBatch and batch[0].size() == 98
    assert caches.kv_bytes(batch) > 0
    caches.keep(batch, [0, 2])
    third = greedy(wide, [second[0][-1], second[2][-1]], batch, 4)
    assert first[0] + second[0] + third[0] == alone[0]
    assert second[2] + third[1] == alone[2][:8]
    resumed = greedy(wide, [second[1][-1]], caches.merge([parked]), 4)[0]
    assert first[1] + second[1] + resumed == alone[1]


def test_quantised_rows_through_the_batch(tiny_wide: Path) -> None:
    """Whoever decodes beside a row, and whether it came late: its output is that of it alone."""
    loaded = load_model(str(tiny_wide))
    requests = [
        request(f"{index}", prompt_of(length, index), max_tokens=12)
        for index, length in enumerate((5, 70, 33, 150, 1))
    ]
    options = CacheOptions(kv_bits=8)
    alone: dict[str, list[int]] = {}
    for one in requests:
        alone |= run(loaded, one, options=options)
    rig = Rig(loaded, options=options, max_batch=3, prefill_step=32)
    rig.admit(*requests[:2])
    rig.step_until("0", 4)
    rig.admit(*requests[2:])
    assert rig.finish() == alone
    assert set(rig.finishes().values()) == {"length"}


def test_quantising_leaves_the_row_as_it_was(wide: Network) -> None:
    cache = read(wide, prompt_of(50))
    quantised(cache, 4)
    assert greedy(wide, [5], cache, 5) == greedy(wide, [5], read(wide, prompt_of(50)), 5)


def test_models_that_can_be_quantised(wide: Network, tmp_path: Path) -> None:
    for bits in (4, 8):
        check_quantised(wide, CacheOptions(kv_bits=bits))
        # Windows and states stay as they are beside it.
        hybrid = tiny_of("olmo_hybrid", tmp_path, head_dim=32, hidden_size=128)
        check_quantised(hybrid, CacheOptions(kv_bits=bits))


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("gpt_oss", {"head_dim": 32, "hidden_size": 128}, "does not support attention sinks"),
        ("mamba", {}, "none of its layers is a plain attention layer"),
        ("llama", {}, r"heads of \(8, 8\) numbers are not in groups of 32"),
    ],
)
def test_models_that_cannot_are_refused_in_one_line(
    tmp_path: Path, kind: str, config: dict[str, Any], reason: str
) -> None:
    network = tiny_of(kind, tmp_path, **config)
    check_quantised(network, CacheOptions())
    with pytest.raises(ModelError, match=f"^--kv-bits: this model cannot: .*{reason}") as refused:
        check_quantised(network, CacheOptions(kv_bits=8))
    assert "\n" not in str(refused.value)


def test_an_attention_that_misreads_quantised_layers_is_refused(
    wide: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(layer: Any, bits: int) -> QuantisedRow:
        row = _quantised_layer(layer, bits)
        row.keys = tuple(part[..., ::-1, :] for part in row.keys)
        row.values = tuple(-part if part.dtype == mx.float32 else part for part in row.values)
        return row

    _quantised_layer = row_cache._quantised_layer
    monkeypatch.setattr(row_cache, "_quantised_layer", other)
    with pytest.raises(ModelError, match="its logits become others"):
        check_quantised(wide, CacheOptions(kv_bits=8))
