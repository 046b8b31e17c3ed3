"""Prompt prefixes that were read once, kept for the rows that begin with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import structlog
from mlx_vlm import apc
from mlx_vlm.apc_adapters import ADAPTER_SCHEMA_VERSION, build_prefix_cache_plan_from_caches

from mlxq.worker.engine.prefix_memory import BLOCK_IDS, CHECKPOINT_IDS, PrefixMemory
from mlxq.worker.engine.prefix_store import PrefixStore
from mlxq.worker.engine.row_cache import Cache, CacheOptions, as_lm, as_vlm, make_row_cache

FIRST_CHECKPOINT_IDS = 512
"""The first checkpoint on the way through a long prompt; the next ones double."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Hit:
    """The cache of a row that has read `length` ids; the caller's own, to go on with."""

    cache: Cache
    length: int


class PrefixStats(NamedTuple):
    """Since the start: look-ups, those that found something, ids that needed no reading.
    At the moment: bytes held in memory and on disk."""

    lookups: int = 0
    hits: int = 0
    reused_ids: int = 0
    kv_bytes: int = 0
    disk_bytes: int = 0


class PrefixCache:
    """What rows have read, by its ids. Engine thread only; the disk tier has a writer of its own.

    A model whose caches are all plain attention is kept in blocks of BLOCK_IDS, which rows share. A
    window that rotates or a recurrent state holds one length alone: such a model is kept whole, at
    the lengths that `checkpoints` names. Either way a hit is a copy, and leaves an id to read.
    """

    def __init__(
        self, memory: PrefixMemory | None, fresh: Cache, blocks: bool, disk: PrefixStore | None
    ) -> None:
        self._memory = memory
        self._fresh = fresh
        self._native = any(a is not b for a, b in zip(fresh, as_vlm(fresh), strict=True))
        self._blocks = blocks
        self._disk = disk
        self._lookups = self._hits = self._reused_ids = 0

    @classmethod
    def of(
        cls,
        network: Any,
        fingerprint: str,
        *,
        memory_bytes: int,
        options: CacheOptions | None = None,
        disk: Path | None = None,
        disk_bytes: int = 0,
    ) -> PrefixCache:
        """The cache for a model; one that keeps nothing, if its layers cannot be restored.

        fingerprint   changes whenever the same ids could give other keys and values
        memory_bytes  most it holds in memory; 0 together with no disk: it keeps nothing
        disk          folder whose files outlive the process; without it, memory is all
        disk_bytes    most that all files in the folder hold together
        """
        options = options or CacheOptions()
        fresh = make_row_cache(network, options)
        known = as_vlm(fresh)
        strategy = build_prefix_cache_plan_from_caches(known).strategy
        parts = [part for layer in known for part in _parts(layer)]
        if any(not type(part).__module__.startswith("mlx_vlm.") for part in parts):
            strategy = None  # the plan takes whatever has a state for restorable
        wanted = memory_bytes > 0 or (disk is not None and disk_bytes > 0)
        if strategy is None or not wanted:
            if wanted:
                kinds = ", ".join(sorted({type(layer).__name__ for layer in fresh}))
                _log.warning("prefix_cache_off", reason=f"no way to restore a layer of {kinds}")
            return cls(None, fresh, False, None)
        blocks = strategy == "block"
        layout, block_bytes = _layout(network, options)
        store = None
        if disk is not None and disk_bytes > 0:
            form = f"{layout} {BLOCK_IDS} {ADAPTER_SCHEMA_VERSION} {options.max_kv_size}"
            namespace = f"{fingerprint}-{hashlib.sha256(form.encode()).hexdigest()[:16]}"
            try:
                store = PrefixStore(disk, namespace, disk_bytes)
            except OSError as error:
                # Two workers of one model on one machine: the second goes without.
                _log.warning("prefix_disk_off", folder=str(disk), reason=str(error))
        memory = PrefixMemory(memory_bytes, block_bytes if blocks else 0, store)
        return cls(memory, fresh, blocks, store)

    @property
    def enabled(self) -> bool:
        return self._memory is not None

    @property
    def in_blocks(self) -> bool:
        """Whether a put at the end of a prefill is worth its copy: of blocks others share a part.

        A cache kept whole is of use to them at `checkpoints` only, and to the next turn of the same
        chat when the row ends.
        """
        return self._blocks

    def take(self, ids: Sequence[int], salt: str = "") -> Hit | None:
        """The cache of the longest prefix of `ids` that was read before, without the last id.

        salt  only what was put with the same one is found
        """
        if self._memory is None:
            return None
        self._lookups += 1
        extra_hash = apc.tenant_scoped_hash(salt)
        find = self._find_blocks if self._blocks else self._find_checkpoint
        cache, length = find(self._memory, list(ids), extra_hash)
        if not length or not self._is_row(cache, length):
            return None
        self._hits += 1
        self._reused_ids += length
        return Hit(as_lm(cache) if self._native else cache, length)

    def wants(self, ids: Sequence[int], salt: str = "") -> bool:
        """Whether a `put` of these ids would keep anything new: ask before copying a row for it."""
        if self._memory is None:
            return False
        extra_hash = apc.tenant_scoped_hash(salt)
        if self._blocks:
            return self._memory.has_new_block(list(ids), extra_hash)
        return len(ids) >= CHECKPOINT_IDS and not self._memory.has_checkpoint(ids, extra_hash)

    def put(
        self, ids: Sequence[int], cache: Cache, salt: str = "", *, place: int | None = None
    ) -> None:
        """Keeps what a row has read.

        The cache stays the caller's. Nothing is kept of a row whose layers were quantised: what is
        found must be what reading would have given.

        cache  the row's own, which holds exactly `ids`
        place  `in_blocks` alone: of the row in the cache of a batch instead, which ends with `ids`
        """
        if not self.wants(ids, salt):
            return
        assert self._memory is not None
        extra_hash = apc.tenant_scoped_hash(salt)
        if place is not None:
            layers = [_of_batch(layer, place, len(ids)) for layer in cache]
        elif list(map(type, cache)) != list(map(type, self._fresh)):
            return
        elif not self._is_row(as_vlm(cache), len(ids)):
            _log.error("prefix_not_put", reason="the cache does not hold what it should")
            return
        elif self._blocks:
            layers = [_of_row(layer, len(ids)) for layer in cache]
        else:
            self._memory.store_exact_cache(ids, as_vlm(cache), extra_hash=extra_hash)
            return
        if all(layers):
            keys, values = map(list, zip(*layers, strict=True))
            self._memory.put_blocks(list(ids), keys, values, extra_hash)

    def checkpoints(self, ids: Sequence[int], already: int = 0, salt: str = "") -> list[int]:
        """Lengths at which the prefill of `ids` is to stop for a `put`, in order.

        None for caches kept in blocks. Otherwise the last multiple of CHECKPOINT_IDS before the
        end, for a repetition and for a template that renders the end anew; lengths that double,
        so that any other prompt finds at least half of what it shares at twice the memory; and
        the length that `ids` shares with an earlier prompt, since others may share it too.

        already  ids that need no reading, from `take`
        """
        if self._memory is None or self._blocks:
            return []
        last = (len(ids) - 1) // CHECKPOINT_IDS * CHECKPOINT_IDS
        lengths = {last, self._memory.shared(ids, apc.tenant_scoped_hash(salt))}
        length = FIRST_CHECKPOINT_IDS
        while length < last:
            lengths.add(length)
            length *= 2
        return sorted(length for length in lengths if already < length <= last)

    def stats(self) -> PrefixStats:
        held = 0 if self._memory is None else self._memory.resident_bytes()
        on_disk = 0 if self._disk is None else self._disk.disk_bytes
        return PrefixStats(self._lookups, self._hits, self._reused_ids, held, on_disk)

    def drain(self) -> None:
        """Waits until the disk has taken what waits for it."""
        if self._disk is not None:
            self._disk.drain()

    def close(self) -> None:
        """Writes what waits for the disk, frees the memory and ends the writer."""
        if self._memory is not None:
            self._memory.close()
            self._memory.clear()
        self._memory = self._disk = None

    def _find_blocks(self, memory: PrefixMemory, ids: list[int], salt: int) -> tuple[Cache, int]:
        blocks, length = memory.lookup_prefix(ids[:-1], salt)
        try:
            # From disk comes all of the prefix, or nothing: it must be worth that.
            loaded, on_disk = memory.lookup_prefix_disk_cache(
                ids[:-1], salt, min_prefix_tokens=length * 4 // 3, allow_memory_overlap=True
            )
            if on_disk > length:
                return loaded, on_disk
            if not length:
                return [], 0
            made = apc.make_warm_kv_cache(blocks, min_capacity_tokens=len(ids))
        finally:
            memory.release(blocks)
        # Not left lazy: the copy would hold on to all of the blocks.
        mx.async_eval([(layer.keys, layer.values) for layer in made])  # type: ignore[no-untyped-call]
        return made, length

    def _find_checkpoint(
        self, memory: PrefixMemory, ids: list[int], salt: int
    ) -> tuple[Cache, int]:
        cache, length = memory.lookup_exact_cache(ids, extra_hash=salt)
        return cache or [], length

    def _is_row(self, cache: Cache, length: int) -> bool:
        """Whether it has the layers of a single row that has read so many ids, and no padding."""
        parts = [part for layer in cache for part in _parts(layer)]
        kinds = [type(part) for layer in as_vlm(self._fresh) for part in _parts(layer)]
        return list(map(type, parts)) == kinds and all(_holds(part, length) for part in parts)


def _layout(network: Any, options: CacheOptions) -> tuple[str, int]:
    """What the arrays of a row look like, and the bytes of one block of it.

    Found by a forward pass that is never computed: shapes and types are known without.
    """
    cache = make_row_cache(network, options)
    network(mx.zeros((1, 1), mx.int32), cache)
    described, block_bytes = [], 0
    for layer in cache:
        for part in _parts(layer):
            arrays = list(_arrays(part))
            shapes = [(array.dtype, array.shape[:2], array.shape[3:]) for array in arrays]
            described.append(f"{type(part).__name__} {getattr(part, 'max_size', '')} {shapes}")
            block_bytes += sum(
                BLOCK_IDS * array.nbytes // array.shape[2] for array in arrays if array.ndim == 4
            )
    return "; ".join(described), block_bytes


def _parts(layer: Any) -> Iterator[Any]:
    """The layer, or what it is composed of."""
    if isinstance(layer, tuple) or hasattr(layer, "caches"):
        for part in layer if isinstance(layer, tuple) else layer.caches:
            yield from _parts(part)
    else:
        yield layer


def _arrays(part: Any) -> Iterator[mx.array]:
    for value in (getattr(part, "keys", None), getattr(part, "values", None)):
        if isinstance(value, mx.array):
            yield value
    yield from (array for array in getattr(part, "cache", ()) if isinstance(array, mx.array))


_KeysAndValues = tuple[mx.array, mx.array]


def _of_row(layer: Any, length: int) -> _KeysAndValues | None:
    """Keys and values of a row's own layer; None if its model does not use it."""
    if layer.keys is None:
        return None
    return layer.keys[..., :length, :], layer.values[..., :length, :]


def _of_batch(layer: Any, place: int, length: int) -> _KeysAndValues | None:
    """The same of a row in a batch, which is padded on the left. None also if it is quantised."""
    if not isinstance(layer.keys, mx.array) or layer._idx < length:
        return None
    ids = slice(layer._idx - length, layer._idx)
    return layer.keys[place : place + 1, :, ids], layer.values[place : place + 1, :, ids]


def _holds(part: Any, length: int) -> bool:
    """Whether a part holds one row of so many ids, as far as it says."""
    arrays = list(_arrays(part))
    if any(array.shape[0] != 1 for array in arrays):
        return False
    offset = getattr(part, "offset", length)
    # A layer that its model does not use stays empty.
    return isinstance(offset, int) and (offset == length or not arrays and offset == 0)
