"""The disk tier of the prefix cache: a folder of bounded size."""

from __future__ import annotations

import fcntl
import json
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import structlog
from mlx_vlm import apc

from mlxq.worker.engine import prefix_file
from mlxq.worker.engine.prefix_file import PrefixFile
from mlxq.worker.engine.prefix_folder import TICK_S, PrefixFolder, delete

QUEUE_BYTES = 512 << 20
"""Most that may wait to be written, but for a single file; what is beyond it is not written."""

FILE_BYTES = 64 << 20
"""About the size of a file of blocks. What is read of a file is read whole."""

_NOWHERE: tuple[Path | None, int] = (None, 0)

_log = structlog.get_logger()


class _Checkpoint(NamedTuple):
    """A cache kept whole: the hash of its salt, its ids as int32."""

    salt: int
    ids: bytes


class _Order(NamedTuple):
    """Something to write: a checkpoint, or else blocks; last used, as it were, at `used_at_s`."""

    file: PrefixFile
    checkpoint: _Checkpoint | None
    used_at_s: float


class PrefixStore(apc.DiskBlockStore):  # type: ignore[misc]  # the library has no types
    """The store of mlx-vlm's APC with its layout and its readers, and a writer of our own.

    Built, read and closed on the engine thread; a thread of its own writes and evicts.
    - The writer touches no MLX: it gets the bytes of arrays that the engine thread evaluated.
    - A file is checked at each use. One that was damaged, cut off or brought from elsewhere is
      deleted, and is no hit.
    - The engine never waits for the disk to take something: what does not fit into the queue, the
      bound or the disk is not stored. It does wait for what it reads.
    - All files under `root` together, also those of other models, stay within `max_bytes`, whatever
      was used longest ago going first. Several processes may share `root`, each with its own
      namespace; each knows what the others have written only when it evicts.

    Raises OSError if the folder cannot be used, or another process has this namespace.
    """

    def __init__(self, root: Path, namespace: str, max_bytes: int) -> None:
        self._namespace = namespace
        self._checkpoints: dict[int, _Checkpoint] = {}
        self._folder = PrefixFolder(root, self.SUFFIX, max_bytes, self._evicted)
        folder = root / apc._safe_namespace(namespace)
        folder.mkdir(parents=True, exist_ok=True)
        # Two writers would delete each other's unfinished files.
        self._lock_file = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            overrides = {"disk_queue_max_gb": QUEUE_BYTES / 2**30}
            super().__init__(root, namespace, 1, max_bytes, overrides=overrides)
        except BaseException:
            self._lock_file.close()
            raise
        # Settings the library takes from the environment alone.
        self._header_cache_max = 4
        self._restore_clear_every = 0

    def close(self) -> None:
        """Writes what waits, and ends the writer."""
        super().close()
        self._lock_file.close()

    def drain(self) -> None:
        """Waits until all that was to be written is."""
        self._q.join()

    def flush(self) -> None:
        """Nothing: the library would wait here for the disk, to bound what the queue holds."""

    # The index

    def _rebuild_index(self) -> int:
        """Reads the headers of all files in the folder, and deletes those that are not ours."""
        for path in self.dir.glob("*.part"):
            delete(path)
        for path in self.dir.glob(f"*{self.SUFFIX}"):
            try:
                self._add(path, prefix_file.describe(path, self._namespace))
            except prefix_file.BAD as error:
                _log.warning("prefix_file_dropped", path=str(path), reason=str(error))
                delete(path)
        self._folder.recount()
        return self._folder.held_bytes

    @property
    def disk_bytes(self) -> int:
        return self._folder.held_bytes

    def _add(self, path: Path, metadata: dict[str, str]) -> None:
        with self._index_lock:
            if metadata["layout"] == "exact_cache_v1":
                key = int(metadata["cache_hash"])
                ids = _packed([int(id) for id in metadata["token_ids"].split(",")])
                self._checkpoints[key] = _Checkpoint(int(metadata["extra_hash"]), ids)
                self._exact_index[key] = path
            else:
                hashes = [int(block) for block in metadata["block_hashes"].split(",")]
                self._index.update((block, (path, at)) for at, block in enumerate(hashes))

    def _drop_index_for_path(self, path: Path) -> None:
        super()._drop_index_for_path(path)
        with self._index_lock:
            gone = self._checkpoints.keys() - self._exact_index.keys()
            for key in gone:
                del self._checkpoints[key]

    def touch(self, hashes: Iterable[int]) -> None:
        """Blocks that follow each other, or a checkpoint, were used: the first is evicted last."""
        with self._index_lock:
            found = [
                self._exact_index.get(key) or self._index.get(key, _NOWHERE)[0] for key in hashes
            ]
        paths = list(dict.fromkeys(path for path in found if path))
        self._folder.used(paths, time.time())

    # Reading: engine thread

    def find_exact_prefix(
        self,
        token_ids: Sequence[int],
        *,
        extra_hash: int = 0,
        max_prefix_tokens: int | None = None,
        min_prefix_tokens: int = 0,
        block_size: int = 0,
    ) -> tuple[int, int] | None:
        """Key and length of the longest checkpoint that `token_ids` begin with, and go on after.

        The index is in memory; the library reads the header of every file at every look-up.
        """
        wanted = _packed(token_ids[:-1])
        # All of it is read: what memory has already must be worth less.
        best, best_length = None, min_prefix_tokens * 4 // 3
        with self._index_lock:
            for key, (salt, ids) in self._checkpoints.items():
                length = len(ids) // 4
                if salt == extra_hash and length > best_length and wanted.startswith(ids):
                    best, best_length = key, length
        return None if best is None else (best, best_length)

    def load_exact_cache(self, cache_hash: int, **options: Any) -> Any:
        path = self._exact_index.get(cache_hash)
        if path is None or not self._checked(path):
            return None
        return super().load_exact_cache(cache_hash, **options)

    def load_layer_major_prefix(self, block_hashes: Sequence[int], **options: Any) -> Any:
        with self._index_lock:
            entries = [self._index.get(block) for block in block_hashes]
        paths = {entry[0] for entry in entries if entry is not None}
        if None in entries or not all([self._checked(path) for path in paths]):
            return None
        return super().load_layer_major_prefix(block_hashes, **options)

    def _checked(self, path: Path) -> bool:
        """Whether the file is as it was written; if not, it is deleted."""
        reason = "its digest is wrong"
        try:
            prefix_file.describe(path, self._namespace)
            if prefix_file.is_intact(path):
                return True
        except prefix_file.BAD as error:
            reason = str(error)
        _log.warning("prefix_file_damaged", path=str(path), reason=reason)
        self._drop_index_for_path(path)
        delete(path)
        return False

    # Ordering what is to be written: engine thread

    def save_exact_cache(
        self,
        cache_hash: int,
        token_ids: Sequence[int],
        extra_hash: int,
        prompt_cache: Sequence[Any],
        *,
        synchronous: bool = False,
    ) -> bool:
        """Queues a checkpoint. False if it will not be stored."""
        metadata = {
            "layout": "exact_cache_v1",
            "cache_hash": str(cache_hash),
            "extra_hash": str(extra_hash),
            "token_ids": ",".join(map(str, token_ids)),
            "num_entries": str(len(prompt_cache)),
            "prefix_trimmable": "0",
        }
        checkpoint = _Checkpoint(extra_hash, _packed(token_ids))
        if self._checkpoints.get(cache_hash) == checkpoint:
            return True
        arrays: dict[str, mx.array] = {}
        for index, layer in enumerate(prompt_cache):
            if not self._snapshot_exact_cache_entry(layer, f"c{index}", arrays, metadata):
                return False
        if empty := apc._extract_empty_tensor_specs(arrays):
            metadata[apc._EMPTY_TENSORS_METADATA] = json.dumps(empty)
        name = self._exact_id_for(cache_hash)
        return self._order(name, [cache_hash], arrays, metadata, checkpoint, time.time())

    def save_layer_major_blocks(
        self,
        blocks: Sequence[Any],
        layer_keys: Sequence[mx.array],
        layer_values: Sequence[mx.array],
        block_size: int,
    ) -> None:
        """Queues blocks of a row, in files of blocks that follow each other."""
        by_index = {block.source_block_idx: block for block in blocks}
        block_bytes = sum(
            array.nbytes // array.shape[2] * block_size for array in (*layer_keys, *layer_values)
        )
        most = max(1, FILE_BYTES // block_bytes)
        pieces = [
            range(first, min(first + most, end))
            for start, end in self._contiguous_ranges(list(by_index))
            for first in range(start, end, most)
        ]
        for behind, piece in enumerate(pieces, start=1):
            ids = slice(piece.start * block_size, piece.stop * block_size)
            arrays = {}
            for layer, (keys, values) in enumerate(zip(layer_keys, layer_values, strict=True)):
                arrays[f"k{layer}"] = keys[..., ids, :]
                arrays[f"v{layer}"] = values[..., ids, :]
            run = [by_index[index] for index in piece]
            hashes = [int(block.block_hash) for block in run]
            metadata = {
                "layout": "layer_major_v2",
                "block_hashes": ",".join(map(str, hashes)),
                "num_layers": str(len(layer_keys)),
                "block_size": str(block_size),
            }
            for at, block in enumerate(run):
                described = {"extra_hash": int(block.extra_hash), "token_ids": block.token_ids}
                metadata[f"b{at}_meta"] = json.dumps(described)
            used_at_s = time.time() - behind * TICK_S
            if not self._order(
                self._shard_id_for(hashes), hashes, arrays, metadata, None, used_at_s
            ):
                break

    def _order(
        self,
        name: str,
        hashes: list[int],
        arrays: dict[str, mx.array],
        metadata: dict[str, str],
        checkpoint: _Checkpoint | None,
        used_at_s: float,
    ) -> bool:
        size = sum(array.nbytes for array in arrays.values())
        with self._in_flight_lock:
            if hashes[0] in self._in_flight:
                return True
        if self._pending_bytes and self._pending_bytes + size > self.queue_max_bytes:
            return False
        file = PrefixFile.of(arrays, metadata | {"namespace": self._namespace})
        if file is None:
            return False
        written = threading.Event()
        with self._pending_lock:
            self._pending_bytes += size
        with self._in_flight_lock:
            self._in_flight.update(dict.fromkeys(hashes, written))
        self._q.put((name, hashes, _Order(file, checkpoint, used_at_s), written, size))
        return True

    # Writing: the writer's thread

    def _write_payload(self, shard_id: str, block_hashes: Sequence[int], payload: _Order) -> bool:
        path = self._shard_path(shard_id)
        try:
            self._folder.write(path, payload.file, payload.used_at_s)
        except Exception as error:
            _log.warning("prefix_file_not_written", path=str(path), error=str(error))
            self._notify_write_callback(self._write_failure_callback, len(block_hashes))
            return False
        with self._index_lock:
            if payload.checkpoint is None:
                self._index.update((block, (path, at)) for at, block in enumerate(block_hashes))
            else:
                self._exact_index[block_hashes[0]] = path
                self._checkpoints[block_hashes[0]] = payload.checkpoint
        self._notify_write_callback(self._write_success_callback, len(block_hashes))
        return True

    def _evicted(self, path: Path) -> None:
        self._drop_index_for_path(path)
        self.evictions += 1

    def _maybe_evict(self) -> int:
        """Nothing: room is made before a file is written."""
        return 0


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)
