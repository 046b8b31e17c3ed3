"""What rows cost, what there is, and when freed buffers go back."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.apc_adapters import cache_memory_components

from mlxq.worker.engine.models import ModelError
from mlxq.worker.engine.row_cache import CacheOptions, as_vlm, make_row_cache, quantised

DEFAULT_SHARE = 0.85
"""Of what the device recommends; the rest is for the system and whatever else runs on it."""

PREFIX_SHARE = 0.1
MAX_CACHE_LIMIT_BYTES = 8 << 30
CLEAR_STEPS = 256
IDLE_CACHE_BYTES = 64 << 20
MEASURED_BYTES = 512 << 20
"""Much larger than any cache of a processor."""

GROWTH_IDS = 256
"""Attention caches grow by so many positions at a time, a batch from wherever it began."""


class KvCost(NamedTuple):
    """Memory of a row's cache.

    bytes_per_token  of layers that hold all positions
    row_bytes        of state that does not grow
    windows          of layers that hold at most so many positions: (positions, bytes of each)
    """

    bytes_per_token: int
    row_bytes: int
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def fixed_bytes(self) -> int:
        """With `fixed_bytes + n * bytes_per_token` a row of n positions is not undercounted."""
        full = sum(window * each for window, each in self.windows)
        return self.row_bytes + full + (GROWTH_IDS - 1) * self.bytes_per_token

    def of(self, tokens: int) -> int:
        """Bytes of one row of so many positions, at most."""
        held = tokens + GROWTH_IDS - 1
        bounded = sum(min(held, window) * each for window, each in self.windows)
        return self.row_bytes + held * self.bytes_per_token + bounded

    def of_batch(self, rows: int, longest: int) -> int:
        """Bytes of rows that decode together: each takes the room of the longest."""
        return rows * self.of(longest)


def measure(network: Any, options: CacheOptions | None = None) -> KvCost:
    """What a row of this model costs while it decodes.

    Found by a forward pass that is never computed: shapes and types are known without. While a row
    is read its layers are not quantised: what it costs then is `measure` without kv_bits.
    """
    options = options or CacheOptions()
    cache = make_row_cache(network, options)
    network(mx.zeros((1, GROWTH_IDS), mx.int32), cache)
    if options.kv_bits is not None:
        cache = quantised(cache, options.kv_bits)
    per_token = row = 0
    windows: dict[int, int] = {}
    for part in cache_memory_components(as_vlm(cache), GROWTH_IDS):
        each = -int(-part.bytes_per_token // 1)
        row += part.fixed_bytes
        if part.window_size is None:
            per_token += each
        else:
            windows[part.window_size] = windows.get(part.window_size, 0) + each
    return KvCost(per_token, row, tuple(sorted(windows.items())))


class MemoryPlan(NamedTuple):
    """How the memory of this process is shared out.

    total_bytes        what MLX may hold altogether
    prefix_bytes       the prefix cache in memory
    cache_limit_bytes  freed buffers that MLX may keep
    kv_bytes           all rows together: the rest, without the weights and the room that the
                       arrays of a step or a prefill chunk take
    """

    total_bytes: int
    prefix_bytes: int
    cache_limit_bytes: int
    kv_bytes: int


def plan_memory(
    model_bytes: int, *, budget: float | None = None, prefix_cache: float | None = None
) -> MemoryPlan:
    """Shares out the memory. Raises ModelError if weights and prefix cache leave none for rows.

    budget        of the whole process: bytes, or up to 1.0 a share of what the device recommends;
                  None: DEFAULT_SHARE
    prefix_cache  of that for the prefix cache: bytes, or up to 1.0 a share; None: PREFIX_SHARE
    """
    total = _amount(DEFAULT_SHARE if budget is None else budget, of=device_bytes())
    prefix = _amount(PREFIX_SHARE if prefix_cache is None else prefix_cache, of=total)
    cache_limit = min(MAX_CACHE_LIMIT_BYTES, total // 16)
    kv = total - model_bytes - prefix - 2 * cache_limit
    if kv <= 0:
        raise ModelError(
            f"the memory budget of {_gb(total)} has no room for rows beside weights of "
            f"{_gb(model_bytes)} and a prefix cache of {_gb(prefix)}: see --memory-budget"
        )
    return MemoryPlan(total, prefix, cache_limit, kv)


def device_bytes() -> int:
    """What the device recommends to use (Metal), or else all of its memory."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if info.get(key):
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def model_bytes(network: Any) -> int:
    """Of all weights, before or after they are loaded."""
    parameters = tree_flatten(network.model.parameters())
    return sum(array.nbytes for _, array in parameters)


def readable_bytes(seconds: float) -> int:
    """What the device can read in this time."""
    array = mx.zeros(MEASURED_BYTES, mx.uint8)
    took_s = []
    for _ in range(4):
        mx.eval(array)
        started_at = time.perf_counter()
        array = array + 1  # reads and writes all of it
        mx.eval(array)
        took_s.append(time.perf_counter() - started_at)
    return int(seconds / min(took_s) * 2 * MEASURED_BYTES)


def set_limits(plan: MemoryPlan) -> None:
    """Bounds what MLX holds. The wired limit stays at 0, the default of MLX.

    Memory wired to 100 % together with a churn of buffers has made macOS panic. Over the memory
    limit MLX waits for work under way to free some, and then allocates all the same.
    """
    mx.set_memory_limit(plan.total_bytes)
    mx.set_cache_limit(plan.cache_limit_bytes)


def end_streams() -> None:
    """A thread that ends with MLX streams of its own can abort the process at exit."""
    mx.clear_cache()
    mx.clear_streams()


class ClearRhythm:
    """Gives freed buffers back where it costs no step. Engine thread only.

    MLX itself bounds them by `cache_limit_bytes`, but buffers of sizes that do not come again, such
    as those of growing caches, would stay there and displace useful ones. And a process without
    work need not hold any.
    """

    def __init__(self, cache_limit_bytes: int) -> None:
        self._limit_bytes = cache_limit_bytes
        self._steps = 0

    def stepped(self, *, idle: bool) -> None:
        """A step is over; idle: no other follows until a new row comes."""
        self._steps += 1
        if idle:
            due = mx.get_cache_memory() > IDLE_CACHE_BYTES
        else:
            due = self._steps >= CLEAR_STEPS and mx.get_cache_memory() > self._limit_bytes // 2
        if due:
            mx.clear_cache()
            self._steps = 0


def _amount(bytes_or_share: float, of: int) -> int:
    return int(bytes_or_share * of if bytes_or_share <= 1.0 else bytes_or_share)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
