"""The memory tier of the prefix cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

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
    takes settings from the environment, counts all blocks anew at each use, makes room for a row
    as if none of its blocks were there, and forgets the beginning of a row before its end.
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

    def put_blocks(self, ids: list[int], row: Sequence[Any], salt: int) -> None:
        """Keeps the full blocks of a row."""
        known, length = self.lookup_prefix(ids, salt)
        self._leased_bytes = len(known) * self._block_bytes
        try:
            new = apc.harvest_blocks_from_batch_cache(
                self, row, ids, extra_hash=salt, skip_first_n_tokens=length
            )
            known = known + new
        finally:
            self._leased_bytes = 0
            self._used(known)

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


def _entry_bytes(entry: Any) -> int:
    if not hasattr(entry, "nbytes"):
        entry.nbytes = apc._cache_nbytes(entry.prompt_cache)
    return int(entry.nbytes)
