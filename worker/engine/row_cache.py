"""The cache of one row: as its model makes it, bounded, or quantised."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import structlog
from mlx_lm.models import cache as lm_cache
from mlx_vlm.models import cache as vlm_cache

from mlxq.worker.engine.models import ModelError, one_line

Cache = list[Any]
"""One entry per layer, of mlx-lm or mlx-vlm."""

_PLAIN = (vlm_cache.KVCache, lm_cache.KVCache)
_TWINS = {
    getattr(lm_cache, name): getattr(vlm_cache, name)
    for name in ("KVCache", "RotatingKVCache", "ChunkedKVCache", "ArraysCache", "CacheList")
}
_NATIVES = {twin: native for native, twin in _TWINS.items()}
_GROUP_SIZES = (64, 32, 128)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How rows keep what they have read.

    kv_bits      4 or 8: keys and values of plain attention layers are quantised once a row
                 decodes; None: kept as they are
    max_kv_size  positions that plain attention layers look back over; None: all of them. Output
                 past it is of another model, as it were: nothing the model was trained for.
    """

    kv_bits: int | None = None
    max_kv_size: int | None = None


def make_row_cache(network: Any, options: CacheOptions) -> Cache:
    """The empty cache of one row, in which it is read. To decode, it needs `quantised`.

    Raises ModelError if max_kv_size is given and the model has no plain attention layer.
    """
    made: Cache = network.make_cache()
    if options.max_kv_size is None:
        return made
    if not any(type(layer) in _PLAIN for layer in made):
        raise ModelError("--max-kv-size: this model has no plain attention layer to bound")
    return [
        # Beside other rows the library cannot keep the first positions, so no row does.
        sys.modules[type(layer).__module__].RotatingKVCache(options.max_kv_size, keep=0)
        if type(layer) in _PLAIN
        else layer
        for layer in made
    ]


class QuantisedRow(vlm_cache.QuantizedKVCache):  # type: ignore[misc]  # the library has no types
    """A quantised layer of one row, for models of both libraries; can become one of a batch.

    group_size  None while it is empty: the first keys and values tell it
    """

    group_size: int | None

    @property
    def state(self) -> Any:
        return (self.keys, self.values) if self.keys is None else super().state

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(super().nbytes)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.group_size = self.group_size or _group_size(keys, values)
        return super().update_and_fetch(keys, values)

    @classmethod
    def merge(cls, rows: Sequence[QuantisedRow]) -> QuantisedBatch:
        """The rows, padded on the left to the longest, in one batch."""
        first = _batch_of_one(rows[0])
        for row in rows[1:]:
            first.extend(_batch_of_one(row))
        return first

    def size(self) -> int:
        return int(self.offset)


class QuantisedBatch(vlm_cache.BatchQuantizedKVCache):  # type: ignore[misc]
    """A quantised layer of a batch: the library's, and what it lacks beside the other classes."""

    def extract(self, idx: int) -> QuantisedRow:
        row = super().extract(idx)
        row.__class__ = QuantisedRow
        return row  # type: ignore[no-any-return]

    def size(self) -> int:
        return int(self._idx)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*(self.keys or ()), *(self.values or ())))


def _batch_of_one(row: QuantisedRow) -> QuantisedBatch:
    batch = QuantisedBatch([0], row.group_size, row.bits)
    if row.keys is not None:
        batch.keys, batch.values = row.state
        batch.offset, batch._idx = mx.array([row.offset]), row.offset
    return batch


def quantised(cache: Cache, bits: int) -> Cache:
    """The cache of a row with its plain attention layers quantised, but for the last of many.

    The last layer stays as it is, as in mlx-vlm: some models suffer where it is quantised. Windows
    and recurrent states stay too: they do not grow. Arrays are lazy; the given cache is unchanged.
    """
    last = len(cache) - 1
    return [
        _quantised_layer(layer, bits)
        if type(layer) in _PLAIN and vlm_cache.should_quantize_kv_layer(index, last + 1)
        else layer
        for index, layer in enumerate(cache)
    ]


def _quantised_layer(layer: Any, bits: int) -> QuantisedRow:
    if layer.keys is None:
        return QuantisedRow(None, bits)
    group_size = _group_size(layer.keys, layer.values)
    row = QuantisedRow(group_size, bits)
    row.offset = layer.offset
    row.keys, row.values = (
        tuple(mx.quantize(array[..., : layer.offset, :], group_size, bits))
        for array in (layer.keys, layer.values)
    )
    return row


def _group_size(keys: mx.array, values: mx.array) -> int:
    widths = (keys.shape[-1], values.shape[-1])
    for size in _GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    raise ValueError(f"heads of {widths} numbers are not in groups of 32")


def check_quantised(network: Any, options: CacheOptions) -> None:
    """Decodes two rows with quantised layers beside each other. Raises ModelError if that fails.

    Not every attention of every model reads quantised layers; those that cannot raise. One that
    misreads them shows in logits that have nothing to do with those of plain layers.
    """
    if options.kv_bits is None:
        return
    rows = [[5, 3, 9, 4, 7, 6, 8], [8, 3, 2]]
    try:
        read = [_read(network, ids[:-1], options) for ids in rows]
        small = [quantised(cache, options.kv_bits) for cache in read]
        layers = sum(isinstance(layer, QuantisedRow) for layer in small[0])
        if not layers:
            raise ValueError("none of its layers is a plain attention layer")
        last = mx.array([[ids[-1]] for ids in rows])
        # Eight bits hardly change a logit: what differs is not the rounding.
        got = network(last, _merged([quantised(cache, 8) for cache in read]))[:, -1]
        wanted = network(last, _merged(read))[:, -1]
        mx.eval(network(last, _merged(small)))
        alike = float(mx.min(_correlation(got, wanted)))
        if not alike > 0.9:
            raise ValueError(f"its logits become others (correlation {alike:.2f})")
    except Exception as error:
        raise ModelError(f"--kv-bits: this model cannot: {one_line(error)}") from error
    _log.info("kv_quantised", bits=options.kv_bits, layers=layers, of_layers=len(small[0]))


def _merged(rows: Sequence[Cache]) -> Cache:
    return [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]


def _read(network: Any, ids: list[int], options: CacheOptions) -> Cache:
    cache = make_row_cache(network, options)
    network(mx.array([ids]), cache)
    return cache


def _correlation(first: mx.array, second: mx.array) -> mx.array:
    """Of each row (rows, vocabulary) of the one with that of the other."""
    centred = [(each - each.mean(-1, keepdims=True)).astype(mx.float32) for each in (first, second)]
    norms = [mx.linalg.norm(each, axis=-1) for each in centred]
    return (centred[0] * centred[1]).sum(-1) / (norms[0] * norms[1])


def as_vlm(cache: Cache) -> Cache:
    """The same layers as classes of mlx-vlm, sharing their arrays; those it has not stay."""
    return [_as(layer, _TWINS) for layer in cache]


def as_lm(cache: Cache) -> Cache:
    """The same layers as classes of mlx-lm, sharing their arrays."""
    return [_as(layer, _NATIVES) for layer in cache]


def _as(layer: Any, table: dict[type, type]) -> Any:
    wanted = table.get(type(layer))
    if wanted is None:
        return layer
    if hasattr(layer, "caches"):
        return wanted(*(_as(part, table) for part in layer.caches))
    if hasattr(layer, "cache"):
        made: Any = wanted(len(layer.cache))
        made.cache, made.left_padding, made.lengths = layer.cache, layer.left_padding, layer.lengths
        return made
    # Keys, values and the counters beside them have the same names in both libraries.
    made = object.__new__(wanted)
    made.__dict__.update(vars(layer))
    return made
