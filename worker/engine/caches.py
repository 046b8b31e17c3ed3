"""What rows do with their caches: one list per row or batch, one entry per layer.

The entries are of mlx-lm or of mlx-vlm, whichever made them; both have the same methods. A row's
own entries and those of a batch are different classes: `merge` leads from one to the other,
`extract` back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

Cache = list[Any]


def merge(rows: Sequence[Cache]) -> Cache:
    """The caches of single rows as one of a batch. Raises TypeError if a layer has no such form."""
    layers = zip(*rows, strict=True)
    for entry in rows[0]:
        if not hasattr(entry, "merge"):
            raise TypeError(f"{type(entry).__name__} cannot hold more than one row")
    return [entries[0].merge(list(entries)) for entries in layers]


def extend(batch: Cache, other: Cache) -> None:
    """Appends the rows of another batch."""
    for entry, more in zip(batch, other, strict=True):
        entry.extend(more)


def keep(batch: Cache, rows: Sequence[int]) -> None:
    """Drops all rows of a batch but these, at least one."""
    kept = mx.array(list(rows), mx.int32)
    for entry in batch:
        entry.filter(kept)


def extract(batch: Cache, rows: Sequence[int]) -> list[Cache]:
    """Copies of single rows, evaluated: a lazy one would hold the memory of the whole batch."""
    mx.eval(arrays(batch))
    copies = [[entry.extract(row) for entry in batch] for row in rows]
    mx.eval([arrays(copy) for copy in copies])
    return copies


def arrays(cache: Cache) -> list[mx.array]:
    """All arrays of a cache that holds something."""
    leaves = tree_flatten([entry.state for entry in cache])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def kv_bytes(cache: Cache) -> int:
    """Memory of a cache, spare room included."""
    return sum(entry.nbytes for entry in cache)
