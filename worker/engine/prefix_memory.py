"""The memory tier of the prefix cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm import apc

from mlxq.worker.engine.prefix_store import PrefixStore

BLOCK_IDS = 64
"""Attention caches are kept in blocks of so many ids: what two prompts share is rounded down."""

CHECKPOINT_IDS = 32
"""Other caches are kept whole, at multiples of so many ids."""

MAX_CHECKPOINTS = 128
MAX_BLOCKS = 65536
MAX_BUFFERS = 300_000
"""Metal allows a process 499,000."""


class PrefixMemory(apc.APCManager):  # type: ignore[misc]  # the library has no types
    """mlx-vlm's APC with its index and copies, but with one bound: bytes.

    The library looks at the free memory of the machine besides (on macOS by starting a process),
    takes settings from the environment, counts all blocks anew at each use, waits for the device
    at each block that it keeps, makes room for a row as if none of its blocks were there, and
    forgets the beginning of a row before its end.
    """

    def __init__(self, memory_bytes: int, block_bytes: int, disk: PrefixStore | None) -> None:
        self._block_bytes = block_bytes
        self._leased_bytes = 0
        # The library has no other switch. By default it chains Python's hash of tuples, for which
        # a prompt can be made up that takes the place of another.
        os.environ["APC_HASH"] = "sha256"
        blocks = min(-(-memory_bytes // block_bytes), MAX_BLOCKS) if block_bytes else 1
        super().__init__(
            num_blocks=max(1, blocks),
            block_size=BLOCK_IDS,
            disk=disk,
            overrides={
                "checkpoint_entries": MAX_CHECKPOINTS if memory_bytes and not block_bytes else 0,
                "checkpoint_guard_tokens": 1,
                "checkpoint_interval_tokens": 0,
                "memory_max_gb": 0,
                "memory_reserve_gb": 0,
            },
        )
        self.memory_max_bytes = memory_bytes
        # Settings the library takes from the environment alone.
        self.exact_cache_min_tokens = CHECKPOINT_IDS
        self._disk_min_free_ram_bytes = 0
        self._layer_major_memory_min_tokens = 0
        self._max_pool_tensors = MAX_BUFFERS

    def has_new_block(self, ids: list[int], salt: int) -> bool:
        """Whether a full block of `ids` is not kept; those that are become the latest used."""
        known, length = self.lookup_prefix(ids, salt)
        self._used(known)
        return int(length) + BLOCK_IDS <= len(ids)

    def put_blocks(
        self, ids: list[int], keys: list[mx.array], values: list[mx.array], salt: int
    ) -> None:
        """Keeps the full blocks of a row, from its keys and values by layer.

        Those in memory that find room, on disk all. Copies are set going, and nothing waits.
        """
        kept, _ = self.lookup_prefix(ids, salt)
        self._leased_bytes = len(kept) * self._block_bytes
        try:
            with self.lock:
                self._keep_rest(kept, ids, keys, values, salt)
        finally:
            self._leased_bytes = 0
            self._used(kept)

    def _keep_rest(
        self,
        kept: list[Any],
        ids: list[int],
        keys: list[mx.array],
        values: list[mx.array],
        salt: int,
    ) -> None:
        """Appends to `kept`, the first blocks of a row, those that follow them."""
        layers = [*keys, *values]
        size = min(sum(layer.nbytes for layer in layers), self.memory_max_bytes)
        self._make_room(size, retain_bytes=size)
        key = kept[-1].block_hash if kept else apc.SEED_PARENT_HASH
        for_disk, copies = [], []
        for index in range(len(kept), len(ids) // BLOCK_IDS):
            parent, its_ids = key, tuple(ids[_span(index)])
            key = apc._hash_tokens(parent, its_ids, salt)
            if self.disk is not None and not self.disk.has(key):
                for_disk.append(apc._DiskLayerMajorBlock(key, parent, salt, its_ids, index))
            block = self._acquired(key, its_ids) or self._empty_block(len(layers))
            if block is None:
                continue
            if block.block_hash is None:
                slabs = [apc._copy_mlx_array(layer[..., _span(index), :]) for layer in layers]
                self._fill(block, key, its_ids, slabs)
                copies += slabs
            kept.append(block)
        mx.async_eval(copies)  # type: ignore[no-untyped-call]
        if for_disk:
            self.disk.save_layer_major_blocks(for_disk, keys, values, BLOCK_IDS)

    def _acquired(self, key: int, ids: tuple[int, ...]) -> Any:
        """The block that holds these ids already, or None."""
        block = self.hash_table.get(key)
        return None if block is None or block.token_ids != ids else self._acquire_existing(block)

    def _empty_block(self, arrays: int) -> Any:
        """A block that finds room, what was used longest ago emptied for it; or None."""
        room = self.memory_max_bytes - self._resident_bytes_locked()
        if room < self._block_bytes or not self._make_tensor_room(arrays):
            return None
        return self._evict_lru()

    def _fill(self, block: Any, key: int, ids: tuple[int, ...], slabs: list[mx.array]) -> None:
        half = len(slabs) // 2
        block.set_kv(slabs[:half], slabs[half:])
        block.block_hash, block.token_ids, block.ref_cnt = key, ids, 1
        self.hash_table[key] = block
        self.stats.stores += 1
        self.stats.stored_tokens += BLOCK_IDS

    def _used(self, blocks: list[Any]) -> None:
        """Releases blocks of one row, which become the latest used, on disk too."""
        self.release(blocks)
        if self.disk is not None:
            self.disk.touch([block.block_hash for block in blocks])

    def has_checkpoint(self, ids: Sequence[int], salt: int) -> bool:
        """Whether these very ids are kept; they become the latest used."""
        key = apc._sequence_hash(ids, salt, self.block_size)
        if key not in self._exact_cache:
            return False
        self._exact_cache.move_to_end(key)
        if self.disk is not None:
            self.disk.touch([key])
        return True

    def shared(self, ids: Sequence[int], salt: int) -> int:
        """The longest prefix of `ids` that a kept row begins with too, in whole CHECKPOINT_IDS."""
        wanted, length = tuple(ids), 0
        for entry in self._exact_cache.values():
            if entry.extra_hash != salt:
                continue
            kept = entry.token_ids
            if wanted[:length] != kept[:length]:
                continue
            while (end := length + CHECKPOINT_IDS) <= min(len(wanted), len(kept)):
                if wanted[length:end] != kept[length:end]:
                    break
                length = end
        return length

    def release(self, blocks: Iterable[Any]) -> None:
        # In the order of release they are evicted: the end of a row is of no use without its start.
        super().release(reversed(list(blocks)))

    _free_head: Any

    def _free_push(self, b: Any) -> None:
        # An empty block is the next one used, before one that holds something is emptied.
        if b.block_hash is not None or self._free_head is None:
            super()._free_push(b)
            return
        b.prev, b.next = None, self._free_head
        self._free_head.prev = b
        self._free_head = b

    def _make_room(self, allocation_bytes: int = 0, *, retain_bytes: int = 0) -> bool:
        """Evicts what was used longest ago until so much more fits. Whether it does."""
        room = self.memory_max_bytes - max(0, retain_bytes - self._leased_bytes)
        while self._resident_bytes_locked() > room and self._evict_one():
            pass
        return self._resident_bytes_locked() <= room

    def _evict_one(self) -> bool:
        if self._exact_cache:
            self._exact_cache.popitem(last=False)
            return True
        block = self._evict_lru(cached_only=True)
        if block is not None:
            self._free_push(block)
        return block is not None

    def _resident_bytes_locked(self) -> int:
        whole = sum(_entry_bytes(entry) for entry in self._exact_cache.values())
        return len(self.hash_table) * self._block_bytes + whole


def _span(index: int) -> slice:
    """The ids of a block."""
    return slice(index * BLOCK_IDS, (index + 1) * BLOCK_IDS)


def _entry_bytes(entry: Any) -> int:
    if not hasattr(entry, "nbytes"):
        entry.nbytes = apc._cache_nbytes(entry.prompt_cache)
    return int(entry.nbytes)
