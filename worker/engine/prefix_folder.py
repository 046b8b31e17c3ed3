"""The folder of the prefix cache: files of all models, within a bound."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mlxq.worker.engine.prefix_file import PrefixFile

FREE_BYTES = 1 << 30
"""What is left free on the disk for others."""

TICK_S = 0.001
"""By so much a file counts as used later than the next of the same row."""

_LOW_WATER = 0.9


class PrefixFolder:
    """Files of any model in the folders under `root`, those used last of all staying.

    The writer's thread alone writes and evicts. Several processes may share `root`: each knows
    what the others have written only when it evicts.

    on_evicted  called with the path of each file that went for another
    held_bytes  of all files, as far as this process knows
    """

    def __init__(
        self, root: Path, suffix: str, most_bytes: int, on_evicted: Callable[[Path], None]
    ) -> None:
        self._root = root
        self._suffix = suffix
        self._most_bytes = most_bytes
        self._on_evicted = on_evicted
        self.held_bytes = 0

    def recount(self) -> None:
        self.held_bytes = sum(size for _, size, _ in self._files())

    def used(self, paths: Sequence[Path], now_s: float) -> None:
        """These files, of one row in their order, were used: the first is evicted last."""
        for before, path in enumerate(reversed(paths), start=1):
            _mark(path, now_s + before * TICK_S)

    def write(self, path: Path, file: PrefixFile, used_at_s: float) -> None:
        """Writes a file, whole or not at all, in place of those used longest ago.

        Raises OSError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._make_room(path.parent, file.size)
        part = path.with_suffix(".part")
        try:
            file.write(part)
            _mark(part, used_at_s)
            replaced = path.stat().st_size if path.is_file() else 0
            part.replace(path)
        finally:
            delete(part)
        self.held_bytes += file.size - replaced

    def _make_room(self, folder: Path, size: int) -> None:
        """Evicts until `size` bytes more are within the bound. Raises OSError if they cannot be."""
        if size > self._most_bytes or shutil.disk_usage(folder).free - size < FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.held_bytes + size <= self._most_bytes:
            return
        files = sorted(self._files())
        self.held_bytes = sum(file_bytes for _, file_bytes, _ in files)
        for _, file_bytes, path in files:
            if self.held_bytes + size <= self._most_bytes * _LOW_WATER:
                break
            delete(path)
            self._on_evicted(path)
            self.held_bytes -= file_bytes

    def _files(self) -> list[tuple[float, int, Path]]:
        """When it was last used, its size and its path, for each file of any model."""
        found = []
        for path in self._root.glob(f"*/*{self._suffix}"):
            with suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found


def delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _mark(path: Path, used_at_s: float) -> None:
    with suppress(OSError):
        os.utime(path, (used_at_s, used_at_s))
