"""From the name of a model to a batch that is ready for rows."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mlxq.worker.engine.batch import MlxBatch
from mlxq.worker.engine.memory import end_streams, measure, model_bytes, plan_memory, set_limits
from mlxq.worker.engine.models import LoadedModel, ModelError, Source, load_model, one_line
from mlxq.worker.engine.prefix_cache import PrefixCache
from mlxq.worker.engine.row_cache import CacheOptions, check_quantised
from mlxq.worker.engine.selfcheck import self_check


def load_batch(
    source: Source | str,
    *,
    max_batch: int = 32,
    prefill_step: int = 2048,
    memory_budget: float | None = None,
    prefix_cache: float | None = None,
    prefix_disk: Path | None = None,
    prefix_disk_bytes: int = 0,
    kv_bits: int | None = None,
    max_kv_size: int | None = None,
) -> MlxBatch:
    """Loads a model and warms it up, on the engine thread.

    Raises ModelError; the thread must then end. For the options of memory see `plan_memory`,
    `PrefixCache.of` and `CacheOptions`.
    """
    # On CUDA cuDNN would make a plan for each new shape of attention, longer than many steps take.
    os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")
    try:
        loaded = load_model(source)
        network = loaded.network
        options = CacheOptions(kv_bits=kv_bits, max_kv_size=max_kv_size)
        plan = plan_memory(model_bytes(network), budget=memory_budget, prefix_cache=prefix_cache)
        set_limits(plan)
        check_quantised(network, options)
        if max_batch > 1:
            loaded = _checked(loaded, options)
        cost = measure(network, options)
        info = replace(
            loaded.info,
            kv_bytes_per_token=cost.bytes_per_token,
            kv_row_bytes=cost.fixed_bytes,
            kv_budget_bytes=plan.kv_bytes,
            max_batch=min(max_batch, loaded.info.max_batch),
        )
        batch = MlxBatch(
            LoadedModel(network, info),
            max_batch=info.max_batch,
            prefill_step=prefill_step,
            options=options,
            kv_cost=cost,
            prefill_cost=measure(network, replace(options, kv_bits=None)),
            budget_bytes=plan.kv_bytes,
            cache_limit_bytes=plan.cache_limit_bytes,
            prefix_cache=PrefixCache.of(
                network,
                info.fingerprint,
                memory_bytes=plan.prefix_bytes,
                options=options,
                disk=prefix_disk,
                disk_bytes=prefix_disk_bytes,
            ),
        )
        _warm_up(batch)
    except BaseException:
        end_streams()
        raise
    return batch


def _checked(loaded: LoadedModel, options: CacheOptions) -> LoadedModel:
    """The model, and how its rows may run. Raises ModelError: not even one runs alone."""
    try:
        return self_check(loaded, options)
    except Exception as error:
        raise _cannot_generate(loaded.info.name, error) from error


def _warm_up(batch: MlxBatch) -> None:
    """Raises ModelError: this model cannot run in a batch at all."""
    try:
        batch.warm_up()
    except Exception as error:
        raise _cannot_generate(batch.info.name, error) from error


def _cannot_generate(name: str, error: Exception) -> ModelError:
    return ModelError(f"{name} fails its first generation: {one_line(error)}")
